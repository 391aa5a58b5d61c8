"""The input processor, which makes a batch of rows on the server."""

from twinkle_client.processor.base import InputProcessor

__all__ = ["InputProcessor"]
