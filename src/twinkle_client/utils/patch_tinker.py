"""Compatibility path: the function that adapts the tinker SDK to our server; see :mod:`twinkle_client.tinker_sdk`."""

from twinkle_client.tinker_sdk import patch_tinker

__all__ = ["patch_tinker"]
