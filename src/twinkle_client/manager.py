"""Compatibility path: scripts for other servers import the client from here; see :mod:`twinkle_client.client`."""

from twinkle_client.client.session import TwinkleClient
from twinkle_client.errors import TwinkleClientError

__all__ = ["TwinkleClient", "TwinkleClientError"]
