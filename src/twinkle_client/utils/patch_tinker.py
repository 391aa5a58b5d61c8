"""Where scripts look for what makes the tinker SDK talk to our server: see :mod:`twinkle_client.tinker_sdk`."""

from twinkle_client.tinker_sdk import patch_tinker

__all__ = ["patch_tinker"]
