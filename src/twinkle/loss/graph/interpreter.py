"""The interpreter of loss graphs: every call is looked up, bounded, charged, computed, and its result is checked.

Limits are counted, not timed, so that a request that succeeded once also succeeds in a replay after a restart. There
are limits for the numbers in one tensor, the numbers made for one sequence, and the work for all sequences of a
request. The time limit is only the last resort.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle.errors import NonFiniteError, UserError
from twinkle.loss.graph.bounds import BOUNDS, CannotComputeError
from twinkle.loss.graph.catalog import CATALOG
from twinkle.loss.graph.nodes import LOGPROBS, Argument, Device, Dots, DType, GraphCall, Items, LossGraph, Ref, Slice
from twinkle.loss.graph.operations import OPERATIONS, as_dtype
from twinkle.loss.graph.weights import weight_of

__all__ = ["CALL_WORK", "DatumLoss", "Limits", "Meter", "evaluate", "resolved"]

FloatArray = NDArray[np.float32]
_MAX_INTEGER = 2**63 - 1
CALL_WORK = 4096  # fixed work of a call, in numbers, beside the numbers it makes
_MAX_DIMENSIONS = 16
_MESSAGE = 300  # characters of torch's message that an error quotes


@dataclass(frozen=True)
class Limits:
    """The limits of one request.

    ``tensor``: numbers in one tensor. ``datum``: numbers made for one sequence. ``work``: numbers computed for all
    sequences of a request, and CALL_WORK for each call; numbers of slow operations count several times (see weights),
    so that the whole of ``work`` takes a few seconds. ``seconds``: time of the request since its Meter was made.
    """

    tensor: int = 2**22
    datum: int = 2**26
    work: int = 2**30
    seconds: float = 10.0


class Meter:
    """Counts how much a request has used of its limits."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._deadline = clock() + limits.seconds
        self._datum = 0
        self._work = 0

    def next_datum(self) -> None:
        self._datum = 0

    def charge(self, made: int, work: int) -> None:
        """Count an operation before it runs. Raise CannotComputeError if it would exceed a limit, or if time is up."""
        limits = self.limits
        self._datum += made
        self._work += work + CALL_WORK
        if made > limits.tensor:
            raise CannotComputeError(f"it would make {made} numbers, allowed: at most {limits.tensor} in one tensor")
        if self._datum > limits.datum:
            raise CannotComputeError(f"the loss makes more than {limits.datum} numbers for one datum")
        if self._work > limits.work:
            raise CannotComputeError("the loss takes more work than one request may: send fewer datums in each")
        self.check_clock()

    def check_clock(self) -> None:
        if self._clock() > self._deadline:
            seconds = f"{self.limits.seconds:g} s"
            raise CannotComputeError(f"the loss took more than {seconds}: send fewer datums in each request")


@dataclass(frozen=True)
class DatumLoss:
    """The loss of one sequence. ``slope``: dL/dlogprobs, with the shape of logprobs."""

    loss: float
    slope: FloatArray
    metrics: Mapping[str, float]


def evaluate(graph: LossGraph, inputs: Mapping[str, NDArray[Any]], where: str, meter: Meter) -> DatumLoss:
    """Evaluate a graph for one sequence.

    inputs: one array of the right rank for every input of the graph, by name. where: names the sequence in error
    messages.
    """
    meter.next_datum()
    with torch.enable_grad():
        values: dict[str, Any] = {
            declared.name: torch.from_numpy(np.array(inputs[declared.name])) for declared in graph.inputs
        }
        logprobs = values[LOGPROBS].requires_grad_()
        for call in graph.calls:
            values[call.name] = _computed(call, values, f"{where}: custom loss {graph.name!r}", meter)
        context = f"{where}: the loss of custom loss {graph.name!r}"
        loss = _scalar(resolved(graph.loss, values), context)
        slope = _slope(loss, logprobs, context)
        meter.check_clock()  # the backward pass takes time, too
    metrics = {
        name: float(_scalar(resolved(argument, values), f"{where}: metric {name!r}"))
        for name, argument in graph.metrics.items()
    }
    return DatumLoss(float(loss.detach()), slope, metrics)


def _computed(call: GraphCall, values: Mapping[str, Any], where: str, meter: Meter) -> Any:
    rule, operation = CATALOG[call.target], OPERATIONS[call.target]
    arguments = tuple(resolved(argument, values) for argument in call.arguments)
    keywords = {name: resolved(argument, values) for name, argument in call.keywords.items()}
    try:
        if call.target.startswith(".") and not (arguments and isinstance(arguments[0], Tensor)):
            raise CannotComputeError("only tensors have methods here")
        bound = BOUNDS[rule.bound](operation, arguments, keywords)
        meter.charge(bound.made, weight_of(call.target, arguments, keywords) * bound.work)
        return _checked(operation(*arguments, **keywords), meter)
    except CannotComputeError as error:
        message = str(error)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        message = _first_line(error)  # torch does not accept these arguments
    raise UserError(f"{where}: {call.name} = {call.target.lstrip('.')}(…): {message}")


def _checked(result: Any, meter: Meter) -> Any:
    """Check the size and type of a result, because later calls build on it."""
    if isinstance(result, Tensor):
        if result.numel() > meter.limits.tensor:
            raise CannotComputeError(f"it made {result.numel()} numbers, allowed: {meter.limits.tensor} in one tensor")
        if result.dim() > _MAX_DIMENSIONS:
            raise CannotComputeError(f"its result has {result.dim()} dimensions, allowed: {_MAX_DIMENSIONS}")
        return result
    if isinstance(result, int | float):  # and bool
        if abs(result) > _MAX_INTEGER and isinstance(result, int):
            raise CannotComputeError("its result is an integer beyond 64 bits")
        return result
    if isinstance(result, tuple):
        return tuple(_checked(each, meter) for each in result)
    if isinstance(result, torch.dtype | torch.device):
        return result
    raise CannotComputeError(f"its result is {type(result).__name__}, allowed: tensors and numbers")


def resolved(argument: Argument, values: Mapping[str, Any]) -> Any:
    match argument:
        case Ref(name):
            return values[name]
        case Items(items, is_list):
            return (list if is_list else tuple)(resolved(item, values) for item in items)
        case Slice(start, stop, step):
            return slice(resolved(start, values), resolved(stop, values), resolved(step, values))
        case Dots():
            return ...
        case DType(name):
            return as_dtype(name)
        case Device():
            return torch.device("cpu")
        case _:
            return argument


def _scalar(value: Any, where: str) -> Tensor:
    if isinstance(value, int | float):
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor) or value.dim() != 0:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"{where} is {shown}, allowed: one number")
    if not bool(torch.isfinite(value.detach())):
        raise NonFiniteError(f"{where} is {float(value.detach())}: no gradient was kept")
    return value


def _slope(loss: Tensor, logprobs: Tensor, where: str) -> FloatArray:
    if not loss.requires_grad:
        raise UserError(f"{where} does not depend on logprobs in a way that can be differentiated")
    try:
        (gradient,) = torch.autograd.grad(loss, logprobs)
    except RuntimeError as error:
        raise UserError(f"{where} has no gradient: {_first_line(error)}") from error
    slope = gradient.float().numpy()
    if not np.isfinite(slope).all():
        raise NonFiniteError(f"{where} has a gradient with NaN or infinity: it was not kept")
    return slope


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:_MESSAGE] or type(error).__name__
