"""Compatibility path: all bodies of the native protocol under one name; see :mod:`twinkle_client.protocol`."""

from twinkle_client.types import model, processor, sampler, server, session, training
from twinkle_client.types.model import *  # noqa: F403
from twinkle_client.types.processor import *  # noqa: F403
from twinkle_client.types.sampler import *  # noqa: F403
from twinkle_client.types.server import *  # noqa: F403
from twinkle_client.types.session import *  # noqa: F403
from twinkle_client.types.training import *  # noqa: F403

__all__: list[str] = []
__all__ += model.__all__
__all__ += processor.__all__
__all__ += sampler.__all__
__all__ += server.__all__
__all__ += session.__all__
__all__ += training.__all__
