"""The optimizer of one adapter of the multi-LoRA model: a torch object for the settings, the Trainer for the updates.

The Trainer holds weights and moments. The object that users have and schedulers change is a real torch optimizer over
one dummy parameter; its settings are read at every step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.hub.construction import check_options
from twinkle.model.library.parameter_groups import check_settings
from twinkle.model.types import AdamParams

# Adam adds weight decay to the gradient, AdamW does not; the Trainer implements both.
OPTIMIZERS: Mapping[str, type[Optimizer]] = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


def build_lora_optimizer(
    optimizer_cls: object, lr: float, weight_decay: float, options: Mapping[str, Any]
) -> Optimizer:
    if isinstance(optimizer_cls, str):
        if optimizer_cls not in OPTIMIZERS:
            raise UnknownNameError("optimizer of a multi-LoRA model", optimizer_cls, OPTIMIZERS)
        optimizer_cls = OPTIMIZERS[optimizer_cls]
    chosen = next((known for known in OPTIMIZERS.values() if known is optimizer_cls), None)
    if chosen is None:
        raise InvalidInputError(
            "optimizer_cls", optimizer_cls, f"{' or '.join(OPTIMIZERS)}, by name or class: adapters share one store"
        )
    on = [name for name in _REFUSED if options.get(name)]
    if on:
        raise UnsupportedError(f"{', '.join(on)}: not supported for the adapters of a multi-LoRA model")
    check_options(chosen, options, given=1)
    check_settings("", {**options, "lr": lr, "weight_decay": weight_decay})
    if options.get("fused") and options.get("foreach"):
        raise InvalidInputError("fused", True, "False with foreach: they exclude each other")
    factory: Callable[..., Optimizer] = chosen
    return factory([nn.Parameter(torch.zeros(1))], lr=lr, weight_decay=weight_decay, **options)


def adam_params(optimizer: Optimizer) -> tuple[AdamParams, bool]:
    """Return the present settings, and whether weight decay is decoupled from the gradient."""
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    params = AdamParams(
        learning_rate=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )
    return params, isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay", False))
