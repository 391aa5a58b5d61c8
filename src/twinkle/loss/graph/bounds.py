"""How many numbers an operation is about to make: asked before it runs.

A bound may be generous, never short: an operation that would make more than is allowed must not begin.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import UserError

__all__ = ["BOUNDS", "Bound", "CannotComputeError", "Value", "shapes_of"]

# What an operation is called with once references are resolved: tensors, numbers, tuples of them, slices, dtypes …
Value = Any
Arguments = Sequence[Value]
Keywords = Mapping[str, Value]

_MAX_PIECES = 256
_SORTING = 16  # sorting makes no more numbers, but takes so many times as long
_EINSUM_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,->")


class CannotComputeError(UserError):
    """This operation does not take such values. Says why; the interpreter adds where."""


@dataclass(frozen=True)
class Bound:
    """At most so many numbers come out, and so many are computed on the way."""

    made: int
    work: int


Operation = Callable[..., Value]
BoundOf = Callable[[Operation, Arguments, Keywords], Bound]


def shapes_of(values: Value) -> list[torch.Size]:
    """Of all tensors in there."""
    if isinstance(values, Tensor):
        return [values.shape]
    if isinstance(values, tuple | list):
        return [shape for value in values for shape in shapes_of(value)]
    return []


def _all_shapes(arguments: Arguments, keywords: Keywords) -> list[torch.Size]:
    return shapes_of([*arguments, *keywords.values()])


def _broadcast_size(shapes: Sequence[Sequence[int]]) -> int:
    rank = max((len(shape) for shape in shapes), default=0)
    return math.prod(max(_size_at(shape, -place) for shape in shapes) for place in range(1, rank + 1))


def _size_at(shape: Sequence[int], place: int) -> int:
    return shape[place] if -place <= len(shape) else 1


def _broadcast(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    shapes = _all_shapes(arguments, keywords)
    size = shapes[0].numel() if len(shapes) == 1 else _broadcast_size(shapes)
    return Bound(size, size)


def _same(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    size = sum(shape.numel() for shape in _all_shapes(arguments, keywords))
    return Bound(size, size)


def _sorted(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    size = _same(operation, arguments, keywords).made
    return Bound(size, _SORTING * size)


def _quantile(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    if len(_all_shapes(arguments, keywords)) != 1:
        raise CannotComputeError("q is a tensor, allowed: a number")
    return _sorted(operation, arguments, keywords)


def _sizes(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Of a tensor that is made anew: its shape as one tuple, or as one number after another."""
    given = [value for value in arguments if not isinstance(value, Tensor)]
    shape = keywords["size"] if "size" in keywords else given[0] if given and not _is_integer(given[0]) else given
    sizes = shape if isinstance(shape, tuple | list) else [shape]
    if not all(_is_integer(size) and size >= 0 for size in sizes):
        raise CannotComputeError(f"its shape is {shape!r}, allowed: integers of 0 and up")
    size = math.prod(sizes)
    return Bound(size, size)


def _is_integer(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _arange(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    names = ("end",) if len(arguments) == 1 else ("start", "end", "step")
    given: dict[str, Value] = {"start": 0, "step": 1, **dict(zip(names, arguments, strict=False)), **keywords}
    numbers: list[Value] = [given.get(name) for name in ("start", "end", "step")]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers) or not numbers[2]:
        raise CannotComputeError(f"start, end and step are {numbers}, allowed: finite numbers and a step that is not 0")
    start, end, step = numbers
    size = math.ceil(max((end - start) / step, 0)) + 1
    return Bound(size, size)


def _join(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    values = [*arguments, *keywords.values()]
    size = sum(shape.numel() for shape in shapes_of(values)) + _count(values)
    return Bound(size, size)


def _count(values: Value) -> int:
    return sum(map(_count, values)) if isinstance(values, tuple | list) else 1


def _index(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    values, index = arguments
    if not isinstance(values, Tensor):
        return Bound(1, 1)
    # A tensor of one integer picks as the integer does; which one makes no difference here.
    picks = [0 if _is_one_integer(pick) else pick for pick in (index if isinstance(index, tuple) else (index,))]
    many = [pick for pick in picks if isinstance(pick, Tensor | list)]
    if any(isinstance(pick, Tensor) and pick.dtype is torch.bool for pick in many):
        if len(many) > 1:
            raise CannotComputeError("a mask among several tensors, allowed: one mask, or tensors of integers")
        return Bound(values.numel(), values.numel())
    return _rehearsed(operation, (values, tuple(picks)), keywords) if many else Bound(values.numel(), 1)


def _is_one_integer(value: Value) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (torch.int32, torch.int64)


def _rehearsed(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Run with tensors that have a shape and no numbers."""
    result = operation(*_without_numbers(tuple(arguments)), **{k: _without_numbers(v) for k, v in keywords.items()})
    size = sum(shape.numel() for shape in shapes_of(result))
    return Bound(size, size)


def _without_numbers(value: Value) -> Value:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return type(value)(_without_numbers(each) for each in value)
    return value


def _unbind(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    (shape,) = _all_shapes(arguments, keywords) or ((),)
    dim = arguments[1] if len(arguments) > 1 else keywords.get("dim", 0)
    if not _is_integer(dim) or not -len(shape) <= dim < len(shape):
        raise CannotComputeError(f"dim {dim!r} of shape {tuple(shape)}")
    return _in_pieces(shape[dim], operation, arguments, keywords)


def _chunk(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    count = arguments[1] if len(arguments) > 1 else keywords.get("chunks")
    return _in_pieces(count, operation, arguments, keywords)


def _split(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    (shape,) = _all_shapes(arguments, keywords) or ((),)
    names = ("split_size_or_sections", "split_size")
    size: Value = (
        arguments[1] if len(arguments) > 1 else next((keywords[name] for name in names if name in keywords), None)
    )
    if _is_integer(size) and size > 0:
        return _in_pieces(math.ceil(max(shape, default=1) / size), operation, arguments, keywords)
    return _in_pieces(len(size) if isinstance(size, tuple | list) else size, operation, arguments, keywords)


def _in_pieces(count: Value, operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    if not _is_integer(count) or not 0 < count <= _MAX_PIECES:
        raise CannotComputeError(f"{count!r} pieces, allowed: 1 to {_MAX_PIECES}")
    return _same(operation, arguments, keywords)


def _matmul(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """(…, m, k) by (…, k, n)."""
    shapes = _all_shapes(arguments, keywords)
    if len(shapes) != 2 or not all(shapes):
        raise CannotComputeError("it takes two tensors, and none that is a single number")
    left, right = shapes
    made = _broadcast_size([left[:-2], right[:-2]]) * _size_at(left, -2) * (right[-1] if len(right) > 1 else 1)
    return Bound(made, made * left[-1])


def _einsum(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """The product of all sizes: no step on the way can be larger."""
    equation, operands = arguments[0] if arguments else None, shapes_of(arguments[1:])
    if not isinstance(equation, str) or not set(equation) <= _EINSUM_CHARACTERS:
        raise CannotComputeError(f"equation {equation!r}, allowed: letters, commas and -> (no dots)")
    terms = equation.replace(" ", "").split("->")[0].split(",")
    if [len(term) for term in terms] != [len(shape) for shape in operands]:
        raise CannotComputeError(f"equation {equation!r} does not fit tensors of shapes {[tuple(s) for s in operands]}")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, operands, strict=True):
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    work = math.prod(sizes.values())
    return Bound(work, work)


def _number(_operation: Operation, _arguments: Arguments, _keywords: Keywords) -> Bound:
    return Bound(1, 1)


# By the word that a rule of the catalog has for it.
BOUNDS: Mapping[str, BoundOf] = {
    "arange": _arange,
    "attribute": _number,
    "broadcast": _broadcast,
    "cast": _broadcast,
    "chunk": _chunk,
    "einsum": _einsum,
    "index": _index,
    "join": _join,
    "matmul": _matmul,
    "number": _number,
    "operator": _broadcast,
    "quantile": _quantile,
    "rehearsed": _rehearsed,
    "same": _same,
    "sizes": _sizes,
    "sorted": _sorted,
    "split": _split,
    "unbind": _unbind,
}
