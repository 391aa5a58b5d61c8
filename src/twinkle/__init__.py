"""Twinkle: many tenants fine-tune and sample their own LoRA adapters on one base model.

``import twinkle`` is cheap. The names in ``_LAZY`` load their module on first use, many of them also torch; so do the
modules in ``_MODULES``, used as ``twinkle.infra``. Import paths of other versions are in :mod:`twinkle.compatibility`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from twinkle import compatibility, extras
from twinkle.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    CapacityError,
    CheckpointError,
    DataError,
    DownloadError,
    InvalidInputError,
    MissingDependencyError,
    NonFiniteError,
    NoOptimizerStateError,
    RankFailedError,
    ResourcesError,
    StreamError,
    TwinkleError,
    UnknownNameError,
    UnsupportedError,
    UploadError,
    UserError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from twinkle_client import __version__ as __version__  # one number for both distributions

if TYPE_CHECKING:
    from twinkle.hub.plugin import Plugin
    from twinkle.infra import (
        CPU,
        GPU,
        NPU,
        DeviceGroup,
        DeviceMesh,
        Platform,
        get_device_placement,
        initialize,
        is_master,
        remote_class,
        remote_function,
        shutdown,
    )
    from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainFailure, TrainItem, TrainResult
    from twinkle.utils.logger import get_logger
    from twinkle.utils.network import find_free_port, find_node_ip
    from twinkle.utils.requirements import exists, requires
    from twinkle.utils.unsafe import check_unsafe, trust_remote_code
    from twinkle_client import init_tinker_client, init_twinkle_client

__all__ = [
    "CPU",
    "GPU",
    "NPU",
    "AdamParams",
    "AdapterExistsError",
    "AdapterNotFoundError",
    "CapacityError",
    "CheckpointError",
    "DataError",
    "Datum",
    "DeviceGroup",
    "DeviceMesh",
    "DownloadError",
    "InvalidInputError",
    "LoraSpec",
    "MissingDependencyError",
    "NoOptimizerStateError",
    "NonFiniteError",
    "Platform",
    "Plugin",
    "RankFailedError",
    "ResourcesError",
    "StreamError",
    "TrainFailure",
    "TrainItem",
    "TrainResult",
    "Trainer",
    "TwinkleError",
    "UnknownNameError",
    "UnsupportedError",
    "UploadError",
    "UserError",
    "WorkerDiedError",
    "WorkerTimeoutError",
    "check_unsafe",
    "exists",
    "find_free_port",
    "find_node_ip",
    "get_device_placement",
    "get_logger",
    "init_tinker_client",
    "init_twinkle_client",
    "initialize",
    "is_master",
    "remote_class",
    "remote_function",
    "requires",
    "shutdown",
    "trust_remote_code",
]

__release_datetime__ = "2026-11-15 00:00:00"  # UTC; set with the version, see docs/releases.md

_LAZY = {
    "AdamParams": "twinkle.model",
    "CPU": "twinkle.infra",
    "Datum": "twinkle.model",
    "DeviceGroup": "twinkle.infra",
    "DeviceMesh": "twinkle.infra",
    "GPU": "twinkle.infra",
    "LoraSpec": "twinkle.model",
    "NPU": "twinkle.infra",
    "Platform": "twinkle.infra",
    "Plugin": "twinkle.hub.plugin",
    "TrainFailure": "twinkle.model",
    "TrainItem": "twinkle.model",
    "TrainResult": "twinkle.model",
    "Trainer": "twinkle.model",
    "check_unsafe": "twinkle.utils.unsafe",
    "exists": "twinkle.utils.requirements",
    "find_free_port": "twinkle.utils.network",
    "find_node_ip": "twinkle.utils.network",
    "get_device_placement": "twinkle.infra",
    "get_logger": "twinkle.utils.logger",
    "init_tinker_client": "twinkle_client",
    "init_twinkle_client": "twinkle_client",
    "initialize": "twinkle.infra",
    "is_master": "twinkle.infra",
    "remote_class": "twinkle.infra",
    "remote_function": "twinkle.infra",
    "requires": "twinkle.utils.requirements",
    "shutdown": "twinkle.infra",
    "trust_remote_code": "twinkle.utils.unsafe",
}

# Modules that scripts use as attributes, such as twinkle.framework_util.seed_everything(), without importing them.
_MODULES = (
    "advantage",
    "checkpoint_engine",
    "cli",
    "data_format",
    "dataloader",
    "dataset",
    "framework_util",
    "hub",
    "images",
    "infra",
    "kernel",
    "loss",
    "metric",
    "model",
    "module",
    "notifier",
    "patch",
    "preprocessor",
    "processor",
    "reward",
    "sampler",
    "server",
    "template",
    "torch_util",
    "utils",
)

compatibility.install()  # or "import twinkle.hub.hub" would not be found; a line in sys.meta_path, nothing is imported


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"twinkle.{name}")
    if name not in _LAZY:
        return compatibility.find_name(__name__, name)
    value = extras.load(_LAZY[name], name)
    globals()[name] = value  # so that the next access finds it without calling this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
