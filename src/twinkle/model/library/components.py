"""Builds losses, metrics, schedulers, templates and processors from a name, class, instance or plugin id."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.hub.construction import check_options, construct, construct_instance, find_class
from twinkle.hub.plugin import Plugin
from twinkle.loss import Loss, check_call_arguments, loss_by_name
from twinkle.loss.interface import Inputs, LossOutput, Outputs
from twinkle.metric import Metric
from twinkle.metric.interface import MODEL_ARGUMENTS
from twinkle.module.scheduler import scheduler_by_name
from twinkle.utils.logger import get_logger


class FunctionLoss(Loss):
    """A plain function ``(inputs, outputs, **kwargs) → {"loss", "num_tokens"}``. Its keywords cannot be checked."""

    def __init__(self, function: Callable[..., LossOutput]) -> None:
        self.function = function

    def __call__(self, inputs: Inputs, outputs: Outputs, **kwargs: Any) -> LossOutput:
        return self.function(inputs, outputs, **kwargs)


def build_loss(loss_cls: object, options: Mapping[str, Any]) -> Loss:
    if isinstance(loss_cls, str) and not Plugin.is_plugin_id(loss_cls):
        loss_cls = loss_by_name(loss_cls)
    built = construct(loss_cls, Loss, "twinkle.loss", options)  # type: ignore[type-abstract]
    return built if isinstance(built, Loss) else FunctionLoss(built)


def check_no_values(loss: Loss) -> None:
    """Raise for a loss on the values of a critic, which a language model does not have."""
    if loss.require_values:
        raise UnsupportedError(f"{type(loss).__name__}: it needs the values of a TransformersValueModel")


def loss_value(loss: Loss, inputs: Inputs, outputs: Outputs, kwargs: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Call a loss, check what it returns (it may be a user's own), and return the loss and its number of tokens."""
    result = loss(inputs, outputs, **kwargs)
    allowed = "{'loss': a tensor of one number, 'num_tokens': a number, 0 for a mean}"
    if not isinstance(result, Mapping) or not {"loss", "num_tokens"} <= result.keys():
        raise InvalidInputError("loss", result, allowed)
    value = result["loss"]
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InvalidInputError("loss", value, allowed)
    return value, float(result["num_tokens"])


def guarded_loss_value(loss: Loss, inputs: Inputs, outputs: Outputs, kwargs: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Do the same as :func:`loss_value`; with TWINKLE_FAIL_FAST=0, any exception of the loss is logged and counts as 0.

    With several processes, an exception in one of them would make the others wait for it in the middle of a step.
    """
    try:
        return loss_value(loss, inputs, outputs, kwargs)
    except Exception as error:
        if read_environment().fail_fast:
            raise
        get_logger().error(f"{type(loss).__name__} failed, its batch counts as 0 (TWINKLE_FAIL_FAST=0): {error!r}")
        return _nothing(outputs), 0.0


def _nothing(outputs: Outputs) -> Tensor:
    """Return a loss of 0 that depends on all floating-point outputs: every process runs the same backward pass."""
    floats = [value for value in outputs.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return torch.stack([value.nan_to_num(0.0, 0.0, 0.0).sum() * 0.0 for value in floats]).sum()


def build_metric(
    metric_cls: object, options: Mapping[str, Any], device_mesh: object, process_group: object, *, alone: bool
) -> Metric:
    """Build a metric as ``metric_cls(device_mesh, process_group, **options)``; an instance is returned as it is.

    A class that takes neither is constructed with ``options``, but only if the process is ``alone``: it could not
    combine the values of several.
    """
    found = find_class(metric_cls, Metric, "twinkle.metric")  # type: ignore[type-abstract]
    if found is None:
        return construct_instance(metric_cls, Metric, "twinkle.metric", options)  # type: ignore[type-abstract]
    for name in options.keys() & {"device_mesh", "process_group"}:
        raise InvalidInputError(name, options[name], "nothing: the model passes its own")
    if _takes_mesh_and_group(found, options):
        check_options(found, options, given=2)
        make: Callable[..., Metric] = found
        return make(device_mesh, process_group, **options)
    if not alone:
        raise InvalidInputError("metric_cls", found.__name__, "a class whose first arguments are the mesh and group")
    check_options(found, options)
    return found(**options)


def _takes_mesh_and_group(metric: type[Metric], options: Mapping[str, Any]) -> bool:
    """Return whether the first two arguments of a metric's constructor are a device mesh and a process group.

    They are if they have these names, or if they must be given and are not among the ``options``.
    """
    first = list(inspect.signature(metric).parameters.values())[:2]
    if any(each.kind is each.VAR_POSITIONAL for each in first):
        return True
    if [each.name for each in first] == ["device_mesh", "process_group"]:
        return all(each.kind is not each.KEYWORD_ONLY for each in first)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in first if each.kind in by_position and each.default is each.empty]
    return len(required) == 2 and not any(each.name in options for each in required)


def build_template(template_cls: object, options: Mapping[str, Any]) -> Any:
    from twinkle.template import Template

    return construct_instance(template_cls, Template, "twinkle.template", options)


def build_processor(processor_cls: object, options: Mapping[str, Any]) -> Any:
    """Build a processor. A function that takes features and returns a batch is accepted too."""
    from twinkle.processor import InputProcessor

    return construct(processor_cls, InputProcessor, "twinkle.processor", options)


def build_scheduler(scheduler_cls: object, optimizer: Optimizer, options: Mapping[str, Any]) -> LRScheduler:
    if isinstance(scheduler_cls, LRScheduler):
        if scheduler_cls.optimizer is not optimizer or options:
            raise InvalidInputError(
                "scheduler_cls", scheduler_cls, "a scheduler of this group's optimizer, without options"
            )
        return scheduler_cls
    if isinstance(scheduler_cls, str):
        is_plugin = Plugin.is_plugin_id(scheduler_cls)
        scheduler_cls = (
            Plugin.load_plugin(scheduler_cls, LRScheduler) if is_plugin else scheduler_by_name(scheduler_cls)
        )
    if not (inspect.isclass(scheduler_cls) and issubclass(scheduler_cls, LRScheduler)):
        raise InvalidInputError("scheduler_cls", scheduler_cls, "the name or class of a learning-rate scheduler")
    if issubclass(scheduler_cls, ReduceLROnPlateau):
        raise UnsupportedError("ReduceLROnPlateau: lr_step has no metric to give it")
    check_options(scheduler_cls, options, given=1)
    before = [dict(group) for group in optimizer.param_groups]
    try:
        return scheduler_cls(optimizer, **options)
    except Exception:  # any type: schedulers have no common error, and some raise after they changed the rate
        for group, settings in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(settings)
        raise


def check_forward_arguments(given: Iterable[str], loss: Loss, metrics: Iterable[Metric]) -> None:
    """Raise for keywords that neither loss nor metrics accept, or that the model itself passes to metrics.

    The keywords of a :class:`FunctionLoss` are unknown: for it, only the second kind is refused.
    """
    if isinstance(loss, FunctionLoss):
        given = [name for name in given if name in MODEL_ARGUMENTS]
    check_call_arguments(given, [loss, *metrics], reserved=MODEL_ARGUMENTS)
