"""What a loss graph will cost, before any of it is computed: its calls run over tensors without numbers.

It counts as the interpreter's meter does. Where a shape depends on numbers (a mask picks some), the largest that it can
have counts; where a call cannot be followed, it counts as much as the largest tensor so far, and so do those that read
its result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import UserError
from twinkle.loss.graph.bounds import BOUNDS, shapes_of
from twinkle.loss.graph.catalog import CATALOG
from twinkle.loss.graph.interpreter import CALL_WORK, Limits, resolved
from twinkle.loss.graph.nodes import Call, LossGraph
from twinkle.loss.graph.operations import OPERATIONS
from twinkle.loss.graph.weights import weight_of

__all__ = ["Shape", "Sizes", "estimated_work"]

Shape = tuple[tuple[int, ...], str]  # of one input, and the name of its dtype
Sizes = tuple[Shape, ...]  # of all inputs of a graph for one sequence, in their order

_MOST_REHEARSALS = 8  # for one request: sequences of about the same size count as the largest of them
_CASTS = (".to", ".cpu", ".type")
_META = torch.device("meta")
# What our bounds and torch raise for arguments that do not fit, and for operations that need numbers.
_MISTAKES = (
    UserError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class _Unknown:
    """The result of a call that could not be followed."""


def estimated_work(graph: LossGraph, sequences: Sequence[Sizes], known: dict[Sizes, int], limits: Limits) -> int:
    """Return the work of all ``sequences``, at most a little more than the limit of a request: it is stopped there.

    ``known``: work of one sequence by its sizes, which is looked up and added to.
    """
    representative = _representatives(sequences)
    for sizes in set(representative.values()) - known.keys():
        known[sizes] = _work_of_one(graph, sizes, limits)
    return min(sum(known[representative[sizes]] for sizes in sequences), 2 * limits.work)


def _representatives(sequences: Iterable[Sizes]) -> dict[Sizes, Sizes]:
    """For each of the sizes, the largest of those that are about as large: there are few of these."""
    ordered = sorted(set(sequences), key=_numbers)
    step = -(-len(ordered) // _MOST_REHEARSALS)
    return {sizes: ordered[min((place // step + 1) * step, len(ordered)) - 1] for place, sizes in enumerate(ordered)}


def _numbers(sizes: Sizes) -> int:
    return sum(torch.Size(shape).numel() for shape, _ in sizes)


def _work_of_one(graph: LossGraph, sizes: Sizes, limits: Limits) -> int:
    work, largest = 0, max((torch.Size(shape).numel() for shape, _ in sizes), default=1)
    values: dict[str, Any] = {
        declared.name: torch.empty(shape, dtype=vars(torch)[dtype], device=_META)
        for declared, (shape, dtype) in zip(graph.inputs, sizes, strict=True)
    }
    with torch.no_grad(), _META:
        for call in graph.calls:
            made, cost, values[call.name] = _rehearsed(call, values, largest, limits)
            work += cost + CALL_WORK
            largest = max(largest, made)
            if made > limits.tensor or work > limits.work:
                break  # the interpreter stops here, too
    return work


def _rehearsed(call: Call, values: Mapping[str, Any], largest: int, limits: Limits) -> tuple[int, int, Any]:
    """Numbers made, work, and the result without numbers."""
    operation = OPERATIONS[call.target]
    arguments = tuple(_placed(resolved(argument, values)) for argument in call.arguments)
    keywords = {name: _placed(resolved(argument, values)) for name, argument in call.keywords.items()}
    weight = weight_of(call.target, arguments, keywords)
    unknown = largest, weight * largest, _Unknown()
    if any(_is_unknown(value) for value in (*arguments, *keywords.values())):
        return unknown
    try:
        bound = BOUNDS[CATALOG[call.target].bound](operation, arguments, keywords)
        made, cost = bound.made, weight * bound.work
        if made > limits.tensor:
            return made, cost, _Unknown()
        picked = _picked(call.target, arguments)
        if picked is not None:
            return made, cost, picked
        if call.target in _CASTS:
            arguments = tuple(value for value in arguments if value != _META)
            keywords = {name: value for name, value in keywords.items() if value != _META}
        return made, cost, operation(*arguments, **keywords)
    except _MISTAKES:
        return unknown  # the interpreter will say what is wrong with it, if anything is


def _picked(target: str, arguments: Sequence[Any]) -> Any:
    """What a mask picks, all of it; None where no mask is used."""
    name = target.rpartition(".")[2]
    if name == "masked_select" and shapes_of(arguments):
        return torch.empty(torch.broadcast_shapes(*shapes_of(arguments))).flatten()
    if name == "getitem" and len(arguments) == 2:
        values, mask = arguments
        if isinstance(values, Tensor) and isinstance(mask, Tensor) and mask.dtype is torch.bool:
            return values.flatten(0, max(mask.dim() - 1, 0)) if values.dim() else values.reshape(1)
    return None


def _placed(value: Any) -> Any:
    """All that has a place is nowhere."""
    if isinstance(value, torch.device) or value == "cpu":
        return _META
    if isinstance(value, tuple | list):
        return type(value)(_placed(each) for each in value)
    return value


def _is_unknown(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_unknown, value))
    if isinstance(value, slice):
        return any(map(_is_unknown, (value.start, value.stop, value.step)))
    return isinstance(value, _Unknown)
