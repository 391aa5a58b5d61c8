"""Where scripts written for other servers look for the client and its error: see :mod:`twinkle_client.client`."""

from twinkle_client.client.session import TwinkleClient
from twinkle_client.errors import TwinkleClientError

__all__ = ["TwinkleClient", "TwinkleClientError"]
