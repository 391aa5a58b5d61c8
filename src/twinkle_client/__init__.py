"""The HTTP client of a Twinkle server. It needs httpx, pydantic and numpy; neither torch nor ``twinkle``.

    from twinkle_client import LoraConfig, init_twinkle_client
    from twinkle_client.model import MultiLoraTransformersModel

    init_twinkle_client("http://localhost:8000")
    model = MultiLoraTransformersModel("Qwen/Qwen3-4B")
    model.add_adapter_to_model("default", LoraConfig(r=16))

``import twinkle_client`` is cheap: each name's module is imported when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_client.client.current import default_client, init_twinkle_client, initialize
    from twinkle_client.client.session import TwinkleClient
    from twinkle_client.errors import (
        AuthenticationError,
        ConnectionLostError,
        GoneError,
        InvalidRequestError,
        LimitError,
        MissingPackageError,
        NotFoundError,
        ResponseError,
        ServerError,
        SessionLostError,
        TwinkleClientError,
    )
    from twinkle_client.model.lora_config import LoraConfig
    from twinkle_client.tinker_sdk import init_tinker_client

__all__ = [
    "AuthenticationError",
    "ConnectionLostError",
    "GoneError",
    "InvalidRequestError",
    "LimitError",
    "LoraConfig",
    "MissingPackageError",
    "NotFoundError",
    "ResponseError",
    "ServerError",
    "SessionLostError",
    "TwinkleClient",
    "TwinkleClientError",
    "default_client",
    "init_tinker_client",
    "init_twinkle_client",
    "initialize",
]

__version__ = "0.1.0"

_HOME = {
    "AuthenticationError": "twinkle_client.errors",
    "ConnectionLostError": "twinkle_client.errors",
    "GoneError": "twinkle_client.errors",
    "InvalidRequestError": "twinkle_client.errors",
    "LimitError": "twinkle_client.errors",
    "LoraConfig": "twinkle_client.model.lora_config",
    "MissingPackageError": "twinkle_client.errors",
    "NotFoundError": "twinkle_client.errors",
    "ResponseError": "twinkle_client.errors",
    "ServerError": "twinkle_client.errors",
    "SessionLostError": "twinkle_client.errors",
    "TwinkleClient": "twinkle_client.client",
    "TwinkleClientError": "twinkle_client.errors",
    "default_client": "twinkle_client.client.current",
    "init_tinker_client": "twinkle_client.tinker_sdk",
    "init_twinkle_client": "twinkle_client.client.current",
    "initialize": "twinkle_client.client.current",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # so that the next access finds it without calling this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
