"""The HTTP client of a Twinkle server. It needs httpx, pydantic and numpy; neither torch nor ``twinkle``.

    from twinkle_client import LoraConfig, init_twinkle_client
    from twinkle_client.model import MultiLoraTransformersModel

    init_twinkle_client("http://localhost:8000")
    model = MultiLoraTransformersModel("Qwen/Qwen3-4B")
    model.add_adapter_to_model("default", LoraConfig(r=16))

A script for the library, ``twinkle``, moves to a server by replacing ``twinkle`` by ``twinkle_client`` in its imports.
Importing a name that the client does not have raises an ImportError with the reason.

``import twinkle_client`` is cheap: each name's module is imported when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from twinkle_client.compatibility import PATHS, OlderImportPaths, missing, warn_of_twinkle_kit

if TYPE_CHECKING:
    from twinkle_client.client.current import default_client, init_twinkle_client, initialize, shutdown
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
    from twinkle_client.infra import CPU, GPU, NPU, DeviceGroup, DeviceMesh, Platform, is_master
    from twinkle_client.model.lora_config import LoraConfig
    from twinkle_client.model.trainer import (
        AdamParams,
        Datum,
        LoraSpec,
        Trainer,
        TrainFailure,
        TrainItem,
        TrainResult,
    )
    from twinkle_client.tinker_sdk import init_tinker_client

__all__ = [
    "CPU",
    "GPU",
    "NPU",
    "AdamParams",
    "AuthenticationError",
    "ConnectionLostError",
    "Datum",
    "DeviceGroup",
    "DeviceMesh",
    "GoneError",
    "InvalidRequestError",
    "LimitError",
    "LoraConfig",
    "LoraSpec",
    "MissingPackageError",
    "NotFoundError",
    "Platform",
    "ResponseError",
    "ServerError",
    "SessionLostError",
    "TrainFailure",
    "TrainItem",
    "TrainResult",
    "Trainer",
    "TwinkleClient",
    "TwinkleClientError",
    "default_client",
    "init_tinker_client",
    "init_twinkle_client",
    "initialize",
    "is_master",
    "shutdown",
]

__version__ = "0.1.0"

_HOME = {
    "AdamParams": "twinkle_client.model.trainer",
    "AuthenticationError": "twinkle_client.errors",
    "CPU": "twinkle_client.infra",
    "ConnectionLostError": "twinkle_client.errors",
    "Datum": "twinkle_client.model.trainer",
    "DeviceGroup": "twinkle_client.infra",
    "DeviceMesh": "twinkle_client.infra",
    "GPU": "twinkle_client.infra",
    "GoneError": "twinkle_client.errors",
    "InvalidRequestError": "twinkle_client.errors",
    "LimitError": "twinkle_client.errors",
    "LoraConfig": "twinkle_client.model.lora_config",
    "LoraSpec": "twinkle_client.model.trainer",
    "MissingPackageError": "twinkle_client.errors",
    "NPU": "twinkle_client.infra",
    "NotFoundError": "twinkle_client.errors",
    "Platform": "twinkle_client.infra",
    "ResponseError": "twinkle_client.errors",
    "ServerError": "twinkle_client.errors",
    "SessionLostError": "twinkle_client.errors",
    "TrainFailure": "twinkle_client.model.trainer",
    "TrainItem": "twinkle_client.model.trainer",
    "TrainResult": "twinkle_client.model.trainer",
    "Trainer": "twinkle_client.model.trainer",
    "TwinkleClient": "twinkle_client.client",
    "TwinkleClientError": "twinkle_client.errors",
    "default_client": "twinkle_client.client.current",
    "init_tinker_client": "twinkle_client.tinker_sdk",
    "init_twinkle_client": "twinkle_client.client.current",
    "initialize": "twinkle_client.client.current",
    "is_master": "twinkle_client.infra",
    "shutdown": "twinkle_client.client.current",
}

warn_of_twinkle_kit()
OlderImportPaths(__name__, PATHS).install()  # older import paths, such as twinkle_client.http.utils


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise missing(PATHS, __name__, name)
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # so that the next access finds it without calling this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
