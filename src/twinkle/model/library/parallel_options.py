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
from twinkle.utils.logger import note_once

logger = logging.getLogger(__name__)

_STRATEGIES = ("accelerate", "native_fsdp")
# The fields of accelerate's DistributedDataParallelKwargs, which describe a wrapper for gradients.
_DDP_OPTIONS = (
    "broadcast_buffers",
    "bucket_cap_mb",
    "check_reduction",
    "comm_hook",
    "comm_state_option",
    "comm_wrapper",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)
_FSDP_OPTIONS = ("expert_parallel", "manual_prefetch", "reshard_after_forward")
_EXPERT_OPTIONS = ("enabled", "ep_size", "ignore_shared_experts", "keep_router_logits", "router_dtype")
_PRECISIONS = {"bf16": "bf16", "fp32": "fp32", "no": "fp32"}


def check_parallel_options(
    *,
    device_mesh: DeviceMesh | None,
    strategy: str,
    ddp_config: Mapping[str, Any] | None,
    fsdp_config: Mapping[str, Any] | None,
    grad_scaler_config: object,
    memory_efficient_init: bool,
) -> bool:
    """Check the options, and return whether gathered shards are freed between forward and backward pass.

    Freed shards are gathered again for the backward pass. What is sharded depends on the mesh alone: all strategies do
    the same here. Options that change how processes work together, but no result, are named in the log.
    """
    if strategy not in _STRATEGIES:
        raise UnknownNameError("strategy", strategy, _STRATEGIES)
    sharded = device_mesh is not None and device_mesh.fsdp_world_size > 1
    given = ["strategy='native_fsdp'"] if strategy == "native_fsdp" else []
    given += ["fsdp_config"] if fsdp_config else []
    if given and not sharded:
        note_once(f"{', '.join(given)}: no effect; nothing is sharded without a device_mesh with fsdp_size > 1")
    if ddp_config:
        _check_ddp(ddp_config)
        note_once("ddp_config: no effect; no wrapper synchronises gradients here, they are added up once a step")
    if memory_efficient_init:
        note_once("memory_efficient_init: no effect; every process reads the weights itself")
    if grad_scaler_config:
        note_once("grad_scaler_config: no effect; gradients are scaled for fp16 only, which is not used here")
    return _reshards(fsdp_config or {}, device_mesh)


def _check_ddp(ddp_config: Mapping[str, Any]) -> None:
    for name in ddp_config:
        if name not in _DDP_OPTIONS:
            raise UnknownNameError("ddp_config entry", name, _DDP_OPTIONS)
    hook = ddp_config.get("comm_hook")
    if hook is not None and getattr(hook, "value", hook) != "no":  # accelerate's DDPCommunicationHookType.NO is "no"
        raise UnsupportedError(f"ddp_config.comm_hook: got {hook!r}; gradients are added up without compression")


def _reshards(fsdp_config: Mapping[str, Any], device_mesh: DeviceMesh | None) -> bool:
    for name in fsdp_config:
        if name not in _FSDP_OPTIONS:
            raise UnknownNameError("fsdp_config entry", name, _FSDP_OPTIONS)
    if fsdp_config.get("expert_parallel") is not None:
        _check_expert_parallel(fsdp_config["expert_parallel"], device_mesh)
    if fsdp_config.get("manual_prefetch"):
        note_once("fsdp_config.manual_prefetch: no effect; it is for experts that processes share")
    value = fsdp_config.get("reshard_after_forward", True)
    if not isinstance(value, bool):
        raise InvalidInputError("fsdp_config.reshard_after_forward", value, "True or False")
    return value


def _check_expert_parallel(given: object, device_mesh: DeviceMesh | None) -> None:
    """Check the options for experts that processes share.

    Each process holds a part of every expert's weights, as of all others, and gathers a layer at a time. So the options
    that say how tokens travel to other processes, and in which precision, have nothing to do.
    """
    if not isinstance(given, Mapping):
        raise InvalidInputError("fsdp_config.expert_parallel", given, f"a mapping with {', '.join(_EXPERT_OPTIONS)}")
    for name in given:
        if name not in _EXPERT_OPTIONS:
            raise UnknownNameError("fsdp_config.expert_parallel entry", name, _EXPERT_OPTIONS)
    for name in ("enabled", "ignore_shared_experts", "keep_router_logits"):
        if not isinstance(given.get(name, False), bool):
            raise InvalidInputError(f"fsdp_config.expert_parallel.{name}", given[name], "True or False")
    if given.get("ignore_shared_experts"):
        raise UnsupportedError(
            "fsdp_config.expert_parallel.ignore_shared_experts: shared experts are a part of a model"
        )
    if given.get("router_dtype") not in (None, "fp32", "bf16"):
        allowed = "fp32, bf16 or None"
        raise InvalidInputError("fsdp_config.expert_parallel.router_dtype", given["router_dtype"], allowed)
    size = given.get("ep_size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise InvalidInputError("fsdp_config.expert_parallel.ep_size", size, "an integer ≥ 1 or None")
    if not given.get("enabled", True):
        return
    processes = 1 if device_mesh is None else device_mesh.world_size
    if processes % (size or 1):
        raise InvalidInputError("fsdp_config.expert_parallel.ep_size", size, f"a divisor of {processes}, the processes")
    if processes > 1 and device_mesh is not None and device_mesh.fsdp_world_size <= 1:
        raise UnsupportedError(
            "fsdp_config.expert_parallel: experts are divided over processes by fsdp_size of the device_mesh, which "
            "must be above 1"
        )
    note_once(
        "fsdp_config.expert_parallel: each process holds a part of all experts, and gathers a layer at a time, as "
        "fsdp_size does it for all weights; routers compute as their family's code does, whatever router_dtype says"
    )


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


# Options of ``from_pretrained`` that change nothing in a model whose decoder layers are our own, and the reason.
_WITHOUT_EFFECT = {
    "attn_implementation": "a multi-LoRA model has its own attention for packed sequences",
    "low_cpu_mem_usage": "weights are read one file at a time",
    "trust_remote_code": "a multi-LoRA model runs no code of the model's repository",
    "use_cache": "training keeps no cache",
    "use_safetensors": "weights are read from the files that the model has",
}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def read_load_options(options: Mapping[str, Any], mixed_precision: str | None) -> str | None:
    """Return the precision of a multi-LoRA model, given options of ``from_pretrained`` and ``mixed_precision``.

    ``dtype`` and ``torch_dtype`` choose it. Other known options are named in the log; unknown ones are refused.
    """
    for name, value in options.items():
        if name in ("dtype", "torch_dtype"):
            dtype = str(value).removeprefix("torch.")
            chosen = {**_DTYPES, "auto": mixed_precision, "None": mixed_precision}.get(dtype, "")
            if chosen == "" or (
                mixed_precision not in (None, "auto") and _PRECISIONS.get(str(mixed_precision)) != chosen
            ):
                allowed = "float32 or bfloat16, and the same as mixed_precision where that is given"
                raise InvalidInputError(name, value, allowed)
            mixed_precision = chosen
        elif name in _WITHOUT_EFFECT:
            note_once(f"{name}: no effect; {_WITHOUT_EFFECT[name]}")
        else:
            raise UnknownNameError("option of MultiLoraTransformersModel", name, (*_WITHOUT_EFFECT, "torch_dtype"))
    return mixed_precision


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
