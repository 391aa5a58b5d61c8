"""Call functions with the arguments that they take, and read attributes by dotted names."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

__all__ = [
    "call_with_supported_kwargs",
    "deep_getattr",
    "filter_from_config_kwargs",
    "has_signature_parameter",
    "signature_info",
]

R = TypeVar("R")

# Arguments of from_pretrained that say how weights are loaded. A model that is made from a config takes none of them.
_LOADING = {
    "adapter_kwargs",
    "cache_dir",
    "code_revision",
    "device_map",
    "force_download",
    "from_flax",
    "from_tf",
    "ignore_mismatched_sizes",
    "key_mapping",
    "local_files_only",
    "low_cpu_mem_usage",
    "max_memory",
    "mirror",
    "offload_buffers",
    "offload_folder",
    "offload_state_dict",
    "output_loading_info",
    "proxies",
    "quantization_config",
    "resume_download",
    "revision",
    "state_dict",
    "subfolder",
    "token",
    "tp_plan",
    "tp_size",
    "trust_remote_code",
    "use_auth_token",
    "use_safetensors",
    "variant",
    "weights_only",
}


def signature_info(function: Callable[..., Any]) -> tuple[bool, frozenset[str]]:
    """Return whether a function takes any keyword (``**kwargs``), and the names of the parameters that it lists.

    For a function whose signature Python does not know, such as some built-in ones: (True, no names).
    """
    try:
        return _signature_info(function)
    except TypeError:  # not hashable, so it cannot be remembered
        return _signature_info.__wrapped__(function)


@lru_cache(maxsize=512)
def _signature_info(function: Callable[..., Any]) -> tuple[bool, frozenset[str]]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return True, frozenset()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return takes_any, frozenset(each.name for each in parameters if each.kind not in variable)


def has_signature_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function lists this parameter, or takes any keyword."""
    takes_any, names = signature_info(function)
    return takes_any or name in names


def call_with_supported_kwargs(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call a function with ``args`` and those of ``kwargs`` that it takes; the others are dropped."""
    return function(*args, **{name: value for name, value in kwargs.items() if has_signature_parameter(function, name)})


def deep_getattr(obj: Any, path: str, default: Any = None) -> Any:
    """Return ``obj.a.b`` for the path ``"a.b"``, or ``default`` if a part is missing. Mappings are read by key."""
    for name in path.split("."):
        if isinstance(obj, Mapping) and name in obj:
            obj = obj[name]
        elif hasattr(obj, name):
            obj = getattr(obj, name)
        else:
            return default
    return obj


def filter_from_config_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that ``from_config`` takes too: those about loading are left out."""
    return {name: value for name, value in kwargs.items() if name not in _LOADING}
