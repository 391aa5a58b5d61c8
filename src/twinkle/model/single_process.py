"""What the models of the library take for one process and one device, until they take more."""

from typing import Protocol

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError

_STRATEGIES = ("accelerate", "native_fsdp")
_PRECISIONS = {"bf16": "bf16", "fp32": "fp32", "no": "fp32"}


class Mesh(Protocol):
    """As much of a device mesh as matters here."""

    @property
    def world_size(self) -> int: ...


def check_single_process(
    *,
    device_mesh: Mesh | None,
    strategy: str,
    ddp_config: object,
    fsdp_config: object,
    grad_scaler_config: object,
    memory_efficient_init: bool,
) -> None:
    if device_mesh is not None and device_mesh.world_size != 1:
        raise UnsupportedError(
            f"device_mesh: {device_mesh.world_size} processes; models run in one process on one device for now"
        )
    if strategy not in _STRATEGIES:
        raise UnknownNameError("strategy", strategy, _STRATEGIES)
    asked = {"ddp_config": ddp_config, "fsdp_config": fsdp_config, "memory_efficient_init": memory_efficient_init}
    given = [name for name, value in asked.items() if value]
    if strategy == "native_fsdp":
        given.append("strategy='native_fsdp'")
    if given:
        raise UnsupportedError(f"{', '.join(given)}: sharding over processes is not supported yet")
    if grad_scaler_config:
        raise UnsupportedError(
            "grad_scaler_config: gradients are scaled for fp16 only, which is not supported; use bf16"
        )


def check_precision(mixed_precision: str) -> str:
    """ "bf16" or "fp32"."""
    if mixed_precision not in _PRECISIONS:
        raise InvalidInputError("mixed_precision", mixed_precision, ", ".join(map(repr, _PRECISIONS)))
    return _PRECISIONS[mixed_precision]
