"""Replacement of layers by class, and of functions by their dotted names: :func:`kernelize`.

    kernelize(model, {Qwen3RMSNorm: FastRMSNorm})
    kernelize(model, {"transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb": {"cuda": fast_rotary}})
    kernelize(model, {Qwen3MLP: hub("org/kernels:SwiGLU", version=1)})

A layer keeps its weights: only its class changes, so the new class must find the attributes of the old one.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.infra import Platform
from twinkle.utils.calls import has_signature_parameter
from twinkle.utils.requirements import requires
from twinkle.utils.unsafe import trust_remote_code

__all__ = ["HubRef", "hub", "kernelize", "npu_builtin"]

M = TypeVar("M")


@dataclass(frozen=True)
class HubRef:
    """A layer in a repository of kernels. It is downloaded when :func:`kernelize` needs it."""

    repo_id: str
    layer_name: str
    revision: str | None = None
    version: int | None = None
    backend: str | None = None


def hub(ref: str, *, revision: str | None = None, version: int | None = None, backend: str | None = None) -> HubRef:
    """Return a reference to the layer ``repository:Layer``. Exactly one of ``revision`` and ``version`` is needed."""
    repo_id, colon, layer = ref.partition(":")
    if not (repo_id and colon and layer):
        raise InvalidInputError("ref", ref, "a repository and a layer, such as 'org/kernels:RMSNorm'")
    if (revision is None) == (version is None):
        raise InvalidInputError("revision", revision, f"exactly one of revision and version (version: {version!r})")
    return HubRef(repo_id, layer, revision, version, backend)


def kernelize(model: M, mapping: Mapping[Any, Any] | None = None) -> M:
    """Replace parts of a model in place and return it. Call it before adapters are added and before the first step.

    A key is a class of layers (all layers of exactly this class get another class), or the dotted name of a function,
    which is replaced for the whole process. A value is the replacement, ``{device type: replacement}`` (ignored on
    other devices), or a reference made by :func:`hub`. Without a mapping, nothing is replaced.

    model: a torch module, or a model of the library that has one as its attribute ``model``.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        raise InvalidInputError("model", model, "a torch module, or a model with one as its attribute 'model'")
    # all replacements are found before the first change, so that an error leaves the model as it was
    changes = [(key, _resolve(value)) for key, value in (mapping or {}).items() if _is_for_this_device(value)]
    for key, _ in changes:
        if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, nn.Module)):
            raise TypeError(
                f"Unsupported mapping key {key!r}: give a class of layers, or the dotted name of a function"
            )
    places = {key: _find_owner(key) for key, _ in changes if isinstance(key, str)}
    for key, value in changes:
        if isinstance(key, str):
            setattr(*places[key], value)
        else:
            _replace_class(module, key, value)
    return model


def npu_builtin(model: object = None) -> dict[Any, Any]:
    """Return the built-in replacements for NPUs: none on other devices, as in the existing library.

    There is no backend for NPUs, so on an NPU it raises UnsupportedError.
    """
    if Platform.device_prefix() == "npu":
        raise UnsupportedError("npu_builtin: there are no kernels for NPUs; train without kernelize")
    return {}


def _is_for_this_device(value: object) -> bool:
    return not isinstance(value, Mapping) or Platform.device_prefix() in value


def _resolve(value: object) -> object:
    """Return the replacement for this device; load it if it is in a repository."""
    if isinstance(value, Mapping):
        value = value[Platform.device_prefix()]
    return _load(value) if isinstance(value, HubRef) else value


def _load(ref: HubRef) -> object:
    requires("kernels")
    if not trust_remote_code():
        raise UnsupportedError(
            f"{ref.repo_id}: kernels from a hub are code that runs in this process; set TWINKLE_TRUST_REMOTE_CODE=1 to "
            "allow it"
        )
    get_kernel = importlib.import_module("kernels").get_kernel
    given = {"revision": ref.revision, "version": ref.version, "backend": ref.backend}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if has_signature_parameter(get_kernel, "trust_remote_code"):  # newer versions ask again, and it is answered above
        options["trust_remote_code"] = True
    kernel = get_kernel(ref.repo_id, **options)
    layers = getattr(kernel, "layers", None)
    if layers is None:
        raise InvalidInputError("ref", ref.repo_id, "a repository with layers")
    if not hasattr(layers, ref.layer_name):
        known = sorted(name for name in vars(layers) if not name.startswith("_"))
        raise InvalidInputError("ref", f"{ref.repo_id}:{ref.layer_name}", f"one of its layers: {', '.join(known)}")
    return getattr(layers, ref.layer_name)


def _replace_class(module: nn.Module, old: type[nn.Module], new: object) -> None:
    if not (isinstance(new, type) and issubclass(new, nn.Module)):
        raise InvalidInputError(f"mapping[{old.__name__}]", new, "a class of torch modules")
    for layer in module.modules():
        if type(layer) is old:
            layer.__class__ = new


def _find_owner(path: str) -> tuple[object, str]:
    """Return the object that has the attribute of a dotted name, and the attribute's own name."""
    parts = path.split(".")
    if len(parts) < 2:
        raise InvalidInputError("mapping key", path, "a dotted name, such as 'package.module.function'")
    for count in range(len(parts) - 1, 0, -1):  # the longest part that is a module
        name = ".".join(parts[:count])
        try:
            owner: object = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise  # the module is there, and something that it imports is not
            continue
        for between in parts[count:-1]:
            owner = getattr(owner, between)
        return owner, parts[-1]
    raise ImportError(f"{path}: there is no module {parts[0]!r}")
