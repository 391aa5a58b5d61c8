"""The cost of a loss graph, estimated before anything is computed: its calls run over meta tensors, which have no data.

The estimate counts like the interpreter's meter. Where a shape depends on data (a mask picks some elements), the
largest possible shape counts. A call that cannot run without data counts as much as the largest tensor so far, and so
does every call that reads its result.
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
from twinkle.loss.graph.nodes import GraphCall, LossGraph
from twinkle.loss.graph.operations import OPERATIONS
from twinkle.loss.graph.weights import weight_of

__all__ = ["Shape", "Sizes", "estimated_work"]

Shape = tuple[tuple[int, ...], str]  # the shape of one input and the name of its dtype
Sizes = tuple[Shape, ...]  # the shapes of all inputs of a graph for one sequence, in the graph's order

_MOST_PROBES = 8  # per request: sequences of similar size count as much as the largest of them
_CASTS = (".to", ".cpu", ".type")
_META = torch.device("meta")
# Raised by our bounds and by torch for arguments that do not fit, and for operations that need data.
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
    """The result of a call that could not run without data."""


def estimated_work(graph: LossGraph, sequences: Sequence[Sizes], known: dict[Sizes, int], limits: Limits) -> int:
    """Return the estimated work of all ``sequences``, at most twice ``limits.work``, at which a request is stopped.

    known: a cache of the work of one sequence by its sizes; new entries are added to it.
    """
    representative = _representatives(sequences)
    for sizes in set(representative.values()) - known.keys():
        known[sizes] = _work_of_one(graph, sizes, limits)
    return min(sum(known[representative[sizes]] for sizes in sequences), 2 * limits.work)


def _representatives(sequences: Iterable[Sizes]) -> dict[Sizes, Sizes]:
    """Map each sequence's sizes to the largest of similar total size, so that only a few have to be estimated."""
    ordered = sorted(set(sequences), key=_numbers)
    step = -(-len(ordered) // _MOST_PROBES)
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
            made, cost, values[call.name] = _measured_on_meta(call, values, largest, limits)
            work += cost + CALL_WORK
            largest = max(largest, made)
            if made > limits.tensor or work > limits.work:
                break  # the interpreter stops here, too
    return work


def _measured_on_meta(call: GraphCall, values: Mapping[str, Any], largest: int, limits: Limits) -> tuple[int, int, Any]:
    """Return the numbers made by a call, its work, and its result as a meta tensor."""
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
        return unknown  # if the call is wrong, the interpreter will report it


def _picked(target: str, arguments: Sequence[Any]) -> Any:
    """Return the largest possible result of ``masked_select`` or of indexing with one mask; None for other calls."""
    name = target.rpartition(".")[2]
    if name == "masked_select" and shapes_of(arguments):
        return torch.empty(torch.broadcast_shapes(*shapes_of(arguments))).flatten()
    if name == "getitem" and len(arguments) == 2:
        values, mask = arguments
        if isinstance(values, Tensor) and isinstance(mask, Tensor) and mask.dtype is torch.bool:
            return values.flatten(0, max(mask.dim() - 1, 0)) if values.dim() else values.reshape(1)
    return None


def _placed(value: Any) -> Any:
    """Replace devices, and the text "cpu", in a value or in tuples and lists by the meta device."""
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
