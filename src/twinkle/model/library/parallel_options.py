"""Checks of the library models' options for several processes and for precision, and the description of a group."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.decoder.precision import default_dtype
from twinkle.model.library.optimizer_group import OptimizerGroup

logger = logging.getLogger(__name__)

_STRATEGIES = ("accelerate", "native_fsdp")
_PRECISIONS = {"bf16": "bf16", "fp32": "fp32", "no": "fp32"}


def check_parallel_options(
    *,
    device_mesh: DeviceMesh | None,
    strategy: str,
    ddp_config: object,
    fsdp_config: Mapping[str, Any] | None,
    grad_scaler_config: object,
    memory_efficient_init: bool,
) -> bool:
    """Check the options, and return whether gathered shards are freed between forward and backward pass.

    Freed shards are gathered again for the backward pass. What is sharded depends on the mesh alone: all strategies do
    the same here.
    """
    if strategy not in _STRATEGIES:
        raise UnknownNameError("strategy", strategy, _STRATEGIES)
    sharded = device_mesh is not None and device_mesh.fsdp_world_size > 1
    given = ["strategy='native_fsdp'"] if strategy == "native_fsdp" else []
    given += ["fsdp_config"] if fsdp_config else []
    if given and not sharded:
        raise UnsupportedError(f"{', '.join(given)}: nothing is sharded without a device_mesh with fsdp_size > 1")
    if ddp_config:
        raise UnsupportedError("ddp_config: no wrapper synchronises gradients here; they are added up once a step")
    if memory_efficient_init:
        raise UnsupportedError("memory_efficient_init: every process reads the weights itself")
    if grad_scaler_config:
        raise UnsupportedError(
            "grad_scaler_config: gradients are scaled for fp16 only, which is not supported; use bf16"
        )
    return _reshards(fsdp_config or {})


def _reshards(fsdp_config: Mapping[str, Any]) -> bool:
    for name in fsdp_config:
        if name != "reshard_after_forward":
            raise UnknownNameError("fsdp_config entry", name, ("reshard_after_forward",))
    value = fsdp_config.get("reshard_after_forward", True)
    if not isinstance(value, bool):
        raise InvalidInputError("fsdp_config.reshard_after_forward", value, "True or False")
    return value


def choose_precision(mixed_precision: str | None, device: torch.device) -> str:
    """Return "bf16" or "fp32" for a value of ``mixed_precision``; None and "auto" leave the choice to the hardware."""
    if mixed_precision is None or mixed_precision == "auto":
        default = default_dtype(device)
        logger.info("mixed_precision: %s, %s", default.name, default.why)
        return default.name
    if mixed_precision not in _PRECISIONS:
        allowed = ", ".join(map(repr, ("auto", *_PRECISIONS)))
        raise InvalidInputError("mixed_precision", mixed_precision, f"{allowed} or None, which means 'auto'")
    return _PRECISIONS[mixed_precision]


_EXAMPLES = 3
# Options of an adapter that are shown if they are set, with PEFT's defaults.
_OPTIONS: Mapping[str, object] = {
    "lora_dropout": 0.0,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "exclude_modules": None,
    "layers_to_transform": None,
    "init_lora_weights": True,
}


def describe(
    group: OptimizerGroup,
    model_id: str,
    adapter_config: Mapping[str, object] | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> str:
    """Return a readable description of a group. ``shapes``: those of the trained parameters, by name."""
    lines = [f"model: {model_id}"]
    if adapter_config is not None:
        lines.append(f"adapter: {group.adapter_name}")
        lines += [f"  {name}: {adapter_config[name]}" for name in ("r", "lora_alpha", "target_modules")]
        options = [name for name, unset in _OPTIONS.items() if adapter_config.get(name, unset) != unset]
        lines += [f"  {name}: {adapter_config[name]}" for name in options]
    count = sum(math.prod(shape) for shape in shapes.values())
    lines.append(f"trained: {count:,} parameters in {len(shapes)} tensors, such as")
    lines += [f"  {name} {shape}" for name, shape in list(shapes.items())[:_EXAMPLES]]
    lines.append(f"loss: {type(group.loss_instance).__name__}")
    if group.optimizer is None:
        lines.append("optimizer: none")
    else:
        rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(group.lr))
        lines.append(f"optimizer: {type(group.optimizer).__name__}, learning rate {rates}")
    scheduler = group.lr_scheduler
    lines.append(f"learning-rate scheduler: {'none' if scheduler is None else type(scheduler).__name__}")
    lines.append(f"gradient accumulation steps: {group.gradient_accumulation_steps}")
    return "\n".join(lines)
