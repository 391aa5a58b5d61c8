"""Selects the parameters that an optimizer gets, and builds any torch optimizer for them."""

import inspect
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from twinkle.errors import InvalidInputError, UnknownNameError, UserError
from twinkle.hub.construction import check_options
from twinkle.hub.plugin import Plugin

# Parameters whose names contain one of these get no weight decay.
_NOT_DECAYED = ("bias", "layernorm", "rmsnorm", "norm")


def trained_parameters(model: nn.Module, adapter_name: str) -> dict[str, nn.Parameter]:
    """Return the parameters of one PEFT adapter, by names without the adapter's name.

    They include biases of the base model, if the adapter's config says that these are trained. With
    ``adapter_name=""`` return all parameters of the model that are not frozen.
    """
    named = dict(model.named_parameters())
    if not adapter_name:
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    own = {name: parameter for name, parameter in named.items() if _belongs(name, adapter_name)}
    configs: Any = getattr(model, "peft_config", {})  # of PEFT's wrapper
    if configs and getattr(configs[adapter_name], "bias", "none") != "none":
        # Such an adapter is the only one, so that nothing else of the base model has a gradient.
        own |= {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    return {".".join(part for part in name.split(".") if part != adapter_name): own[name] for name in own}


def build_optimizer(
    optimizer_cls: object,
    parameters: Mapping[str, nn.Parameter],
    lr: float,
    weight_decay: float,
    params: Any,
    options: Mapping[str, Any],
) -> Optimizer:
    """Build an optimizer for ``parameters``, in one group with weight decay and one without.

    ``params``, where given, is used instead of these two groups. An optimizer that is built already is returned as is.
    """
    if isinstance(optimizer_cls, Optimizer):
        if options or params is not None:
            raise InvalidInputError("optimizer_cls", optimizer_cls, "a class or name, with options or params")
        return optimizer_cls
    chosen = _optimizer_class(optimizer_cls)
    check_settings("", {"lr": lr, "weight_decay": weight_decay})
    options = {"lr": lr, "weight_decay": weight_decay, **options}
    check_options(chosen, options, given=1)
    groups = decay_groups(parameters, lr, weight_decay) if params is None else params
    factory: Callable[..., Optimizer] = chosen
    return factory(groups, **options)


def decay_groups(parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    if not parameters:
        raise UserError("set_optimizer: there is nothing to train; all parameters are frozen")
    decayed = [pair for pair in parameters.items() if is_decayed(pair[0])]
    rest = [pair for pair in parameters.items() if not is_decayed(pair[0])]
    groups = [(decayed, weight_decay), (rest, 0.0)]
    return [{"params": members, "lr": lr, "weight_decay": decay} for members, decay in groups if members]


def is_decayed(name: str) -> bool:
    """Return whether the parameter of this name gets weight decay: norms and biases do not."""
    return not any(word in name.lower() for word in _NOT_DECAYED)


def check_settings(prefix: str, settings: Mapping[str, Any]) -> None:
    """Check lr, weight_decay, eps and betas. torch does not check them when they are set on an existing optimizer."""
    for name in settings.keys() & {"lr", "weight_decay", "eps"}:
        value = settings[name]
        if not is_number(value) or not 0 <= value <= sys.float_info.max:
            raise InvalidInputError(f"{prefix}{name}", value, "a number ≥ 0")
    betas = settings.get("betas", (0.9, 0.999))
    if not isinstance(betas, list | tuple) or len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
        raise InvalidInputError(f"{prefix}betas", betas, "two numbers from 0 to below 1")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def apply_optim_params(optimizer: Optimizer, optim_params: Mapping[str, Any]) -> None:
    """Set the options of an Adam or AdamW optimizer for this and later steps, as ``step(optim_params=…)`` does.

    Parameter groups without weight decay stay without it.
    """
    allowed = ("lr", "weight_decay", "eps", "betas")
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise InvalidInputError("optim_params", type(optimizer).__name__, "an Adam or AdamW optimizer")
    for name in optim_params:
        if name not in allowed:
            raise UnknownNameError("optim_params entry", name, allowed)
    if "lr" not in optim_params:
        raise InvalidInputError("optim_params", dict(optim_params), "a mapping with 'lr'")
    check_settings("optim_params.", optim_params)
    for group in optimizer.param_groups:
        settings = dict(optim_params)
        if group["weight_decay"] == 0:  # the group of norms and biases
            settings.pop("weight_decay", None)
        group.update(settings)


def _optimizer_class(optimizer_cls: object) -> type[Optimizer]:
    if isinstance(optimizer_cls, str) and Plugin.is_plugin_id(optimizer_cls):
        optimizer_cls = Plugin.load_plugin(optimizer_cls, Optimizer)
    elif isinstance(optimizer_cls, str):
        known = {
            name: value
            for name, value in vars(torch.optim).items()
            if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
        }
        if optimizer_cls not in known:
            raise UnknownNameError("optimizer", optimizer_cls, known)
        optimizer_cls = known[optimizer_cls]
    if not (inspect.isclass(optimizer_cls) and issubclass(optimizer_cls, Optimizer)):
        raise InvalidInputError("optimizer_cls", optimizer_cls, "the name, class or instance of a torch optimizer")
    return optimizer_cls


def _belongs(name: str, adapter_name: str) -> bool:
    """Return whether a parameter belongs to an adapter.

    PEFT names such parameters …lora_A.<adapter>…, …modules_to_save.<adapter>… or …trainable_tokens_delta.<adapter>.
    """
    parts = name.split(".")
    owners = [part for part, after in pairwise(parts) if after == adapter_name]
    return any(owner.startswith("lora_") or owner in ("modules_to_save", "trainable_tokens_delta") for owner in owners)
