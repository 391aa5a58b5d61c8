"""The optimizer of one adapter of the multi-LoRA model: a torch object for the settings, the Trainer for the updates.

The Trainer holds weights and state. The object that users have and schedulers change is a real torch optimizer over one
dummy parameter; its settings are read at every step.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.hub.construction import check_options
from twinkle.model.adapters import optimizer as row_optimizers
from twinkle.model.library.parameter_groups import check_settings, is_number
from twinkle.model.types import AdamParams

# Adam adds weight decay to the gradient, AdamW does not; the Trainer implements both with the same state.
_ADAMS = ("Adam", "AdamW")
OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in sorted((*_ADAMS, *row_optimizers.OPTIMIZERS))
    if hasattr(torch.optim, name)  # torch has Muon from version 2.9 on
}
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")
# How torch computes, not what: the Trainer decides that.
_WITHOUT_EFFECT = ("foreach", "fused")


class SteppingTrainer(Protocol):
    """The methods of a :class:`~twinkle.model.Trainer` that take a step."""

    def optim_step(
        self, adapter_id: str, params: AdamParams, *, decoupled: bool = True, decay_norms: bool = True
    ) -> dict[str, float]: ...

    def optimizer_step(
        self, adapter_id: str, name: str, settings: Mapping[str, Any], *, decay_norms: bool = True
    ) -> dict[str, float]: ...


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
            "optimizer_cls", optimizer_cls, f"{', '.join(OPTIMIZERS)}, by name or class: adapters share one store"
        )
    on = [name for name in _REFUSED if options.get(name)]
    if on:
        raise UnsupportedError(f"{', '.join(on)}: not supported for the adapters of a multi-LoRA model")
    check_options(chosen, options, given=1)
    check_settings("", {**options, "lr": lr, "weight_decay": weight_decay})
    if options.get("fused") and options.get("foreach"):
        raise InvalidInputError("fused", True, "False with foreach: they exclude each other")
    settings = {"lr": lr, "weight_decay": weight_decay, **options}
    _check_types(chosen, settings)
    _check_numbers(settings)
    factory: Callable[..., Optimizer] = chosen
    if chosen.__name__ in row_optimizers.OPTIMIZERS:
        row_optimizers.check_steps(chosen.__name__, settings)
    return factory([nn.Parameter(torch.zeros(1, 1))], **settings)  # a matrix, because Muon takes nothing else


def take_step(trainer: SteppingTrainer, adapter_id: str, optimizer: Optimizer) -> None:
    """Take one step with the present settings of ``optimizer``.

    Where all parameters of a model are trained, norms and biases get no weight decay, as in a TransformersModel.
    """
    name = type(optimizer).__name__
    if name in _ADAMS:
        params, decoupled = adam_params(optimizer)
        trainer.optim_step(adapter_id, params, decoupled=decoupled, decay_norms=False)
        return
    settings = settings_of(optimizer)
    _check_numbers(settings)  # a schedule may have changed them
    trainer.optimizer_step(adapter_id, name, settings, decay_norms=False)


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the present settings as keywords of the optimizer's constructor."""
    known = inspect.signature(type(optimizer)).parameters
    group = optimizer.param_groups[0]
    return {
        name: value
        for name, value in group.items()
        if name in known and name != "params" and name not in (*_REFUSED, *_WITHOUT_EFFECT)
    }


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


def _check_types(chosen: type[Optimizer], settings: Mapping[str, Any]) -> None:
    """Check that settings have the types of the constructor's defaults: torch takes any value that is true as True."""
    for name, parameter in inspect.signature(chosen).parameters.items():
        if name not in settings or name in _REFUSED:
            continue
        value, default = settings[name], parameter.default
        if isinstance(default, bool) or name in _WITHOUT_EFFECT:
            if not isinstance(value, bool) and not (name in _WITHOUT_EFFECT and value is None):
                raise InvalidInputError(name, value, "True or False")
        elif isinstance(default, tuple):
            if not isinstance(value, list | tuple) or len(value) != len(default) or not all(map(is_number, value)):
                raise InvalidInputError(name, value, f"{len(default)} numbers")
        elif default is not None and not is_number(value):
            raise InvalidInputError(name, value, "a number")


def _check_numbers(settings: Mapping[str, Any]) -> None:
    """Check what torch does not: numbers that are not finite, and an ``eps`` of 0.

    An adapter's row has zeros that are not weights (the padding of its rank). Without ``eps`` they would become NaN.
    """
    for field, value in settings.items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int | float) and not math.isfinite(number):
                raise InvalidInputError(field, value, "finite numbers")
    if "eps" in settings and not settings["eps"] > 0:
        raise InvalidInputError("eps", settings["eps"], "a number > 0")
