"""Upper bounds on the numbers that an operation makes and on its work, computed before the operation runs.

A bound may be too high but must not be too low: an operation that would exceed a limit must not begin. Arguments that
decide the cost must be plain numbers, which are checked here: torch would also accept a tensor in their place, whose
value we do not know. The backward pass counts, too: the gradient of a single picked element is as large as the tensor
it was picked from.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import UserError

__all__ = ["BOUNDS", "Bound", "CannotComputeError", "Value", "shapes_of"]

# A resolved argument of an operation: a tensor, a number, a tuple of them, a slice, a dtype …
Value = Any
Arguments = Sequence[Value]
Keywords = Mapping[str, Value]

_MAX_PIECES = 256
_MAX_PASSES = 8  # for operations that go over their whole input several times
_SORTING = 16  # work of sorting, relative to the numbers it makes
_SCANNING = 4  # work of a scan such as cumsum, most of it in the backward pass
_DIVIDING = 64  # remainders are computed bit by bit, which takes microseconds for numbers that are far apart
_EINSUM_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,->")


class CannotComputeError(UserError):
    """An operation refuses its arguments, or a limit is exceeded. The interpreter adds which operation and sequence."""


@dataclass(frozen=True)
class Bound:
    """The upper bounds of one operation.

    ``made``: numbers in the result, or held at once on the way to it. ``work``: numbers computed, forward and backward.
    """

    made: int
    work: int


Operation = Callable[..., Value]
BoundOf = Callable[[Operation, Arguments, Keywords], Bound]


def shapes_of(values: Value) -> list[torch.Size]:
    """Return the shapes of a tensor, or of all tensors in nested tuples and lists."""
    if isinstance(values, Tensor):
        return [values.shape]
    if isinstance(values, tuple | list):
        return [shape for value in values for shape in shapes_of(value)]
    return []


def _all_shapes(arguments: Arguments, keywords: Keywords) -> list[torch.Size]:
    return shapes_of([*arguments, *keywords.values()])


def _named(names: str, arguments: Arguments, keywords: Keywords) -> dict[str, Value]:
    """Return arguments by name, whether they were given by position or by keyword."""
    return {**dict(zip(names.split(), arguments, strict=False)), **keywords}


def _numbers_in(shapes: Sequence[Sequence[int]]) -> int:
    """Return how many numbers these shapes hold. Python's integers cannot overflow."""
    return sum(math.prod(shape) for shape in shapes)


def _broadcast_size(shapes: Sequence[Sequence[int]]) -> int:
    rank = max((len(shape) for shape in shapes), default=0)
    return math.prod(max(_size_at(shape, -place) for shape in shapes) for place in range(1, rank + 1))


def _size_at(shape: Sequence[int], place: int) -> int:
    return shape[place] if -place <= len(shape) else 1


def _broadcast(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    shapes = _all_shapes(arguments, keywords)
    size = math.prod(shapes[0]) if len(shapes) == 1 else _broadcast_size(shapes)
    return Bound(size, size)


def _divided(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    size = _broadcast(operation, arguments, keywords).made
    return Bound(size, _DIVIDING * size)


def _quotient(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Bound a division. With a rounding mode it computes the remainder, which is slow."""
    rounded = keywords.get("rounding_mode") is not None
    return (_divided if rounded else _broadcast)(operation, arguments, keywords)


def _where(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Bound ``where``. With a condition alone it returns the indices where it holds: one number for each dimension."""
    bound = _broadcast(operation, arguments, keywords)
    if len(arguments) + len(keywords) > 1:
        return bound
    size = bound.made * max((len(shape) for shape in _all_shapes(arguments, keywords)), default=1)
    return Bound(size, size)


def _same(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    size = _numbers_in(_all_shapes(arguments, keywords))
    return Bound(size, size)


def _diff(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    return _in_passes(_named("input n", arguments, keywords).get("n", 1), "n", operation, arguments, keywords)


def _roll(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    shifts = _named("input shifts", arguments, keywords).get("shifts")
    passes = len(shifts) if isinstance(shifts, tuple | list) else 1
    return _in_passes(passes, "the number of shifts", operation, arguments, keywords)


def _in_passes(passes: Value, name: str, operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    if not _is_integer(passes) or not 0 <= passes <= _MAX_PASSES:
        raise CannotComputeError(f"{name} is {_shown(passes)}, allowed: an integer from 0 to {_MAX_PASSES}")
    size = _same(operation, arguments, keywords).made
    return Bound(size, max(passes, 1) * size)


def _norm(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Bound a norm. The nuclear norm needs singular values and is not offered."""
    _check_order("p", _named("input p", arguments, keywords).get("p"))
    return _same(operation, arguments, keywords)


def _linalg_norm(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Bound ``linalg.norm``. Matrix norms that need singular values are not offered."""
    given = _named("A ord dim", arguments, keywords)
    order, dim = given.get("ord"), given.get("dim")
    _check_order("ord", order)
    one = len(dim) == 1 if isinstance(dim, tuple | list) else _is_integer(dim)
    of_vectors = one or (dim is None and all(len(shape) == 1 for shape in shapes_of(given.get("A"))))
    if not of_vectors and order not in (None, "fro", 1, -1, math.inf, -math.inf):
        raise CannotComputeError(f"ord is {order!r} of a matrix, allowed: 'fro', 1, -1, inf and -inf")
    return _same(operation, arguments, keywords)


def _check_order(name: str, order: Value) -> None:
    if order is not None and not _is_number(order) and not (isinstance(order, str) and order == "fro"):
        raise CannotComputeError(f"{name} is {_shown(order)}, allowed: a number or 'fro'")


def _sorted(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    size = _same(operation, arguments, keywords).made
    return Bound(size, _SORTING * size)


def _scanned(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    size = _same(operation, arguments, keywords).made
    return Bound(size, _SCANNING * size)


def _quantile(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    if len(_all_shapes(arguments, keywords)) != 1:
        raise CannotComputeError("q is a tensor, allowed: a number")
    return _sorted(operation, arguments, keywords)


def _sizes(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Bound a new tensor, whose shape is given as one tuple or as separate numbers."""
    first: Value = arguments[0] if arguments else ()
    shape: Value = keywords["size"] if "size" in keywords else arguments if _is_integer(first) else first
    sizes = shape if isinstance(shape, tuple | list) else [shape]
    if not all(_is_integer(size) and size >= 0 for size in sizes):
        raise CannotComputeError(f"its shape is {[_shown(size) for size in sizes]}, allowed: integers of 0 and up")
    size = math.prod(sizes)
    return Bound(size, size)


def _new_sizes(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Bound a new tensor made by a method. The tensor it is called on decides only dtype and device."""
    return _sizes(operation, arguments[1:], keywords)


def _is_integer(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Value) -> bool:
    return _is_integer(value) or isinstance(value, float)


def _shown(value: Value) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _view(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Return the bound of a ``view``.

    Only a new shape is allowed: a view as another dtype could make invalid numbers of the bytes.
    """
    if any(isinstance(value, torch.dtype) for value in arguments):
        raise CannotComputeError("a dtype, allowed: a shape (to change the dtype, use .to)")
    return _same(operation, arguments, keywords)


def _arange(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    names = "end" if len(arguments) == 1 and "end" not in keywords else "start end step"
    given: dict[str, Value] = {"start": 0, "step": 1, **_named(names, arguments, keywords)}
    numbers: list[Value] = [given.get(name) for name in ("start", "end", "step")]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers) or not numbers[2]:
        raise CannotComputeError(f"start, end and step are {numbers}, allowed: finite numbers and a step that is not 0")
    start, end, step = numbers
    size = math.ceil(max((end - start) / step, 0)) + 1
    return Bound(size, size)


def _join(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    values = [*arguments, *keywords.values()]
    size = _numbers_in(shapes_of(values)) + _count(values)
    return Bound(size, size)


def _count(values: Value) -> int:
    return sum(map(_count, values)) if isinstance(values, tuple | list) else 1


def _index(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    values, index = arguments
    if not isinstance(values, Tensor):
        return Bound(1, 1)
    # A tensor with one integer picks like that integer; its value makes no difference to the size.
    picks = [0 if _is_one_integer(pick) else pick for pick in (index if isinstance(index, tuple) else (index,))]
    many = [pick for pick in picks if isinstance(pick, Tensor | list)]
    if any(isinstance(pick, Tensor) and pick.dtype is torch.bool for pick in many):
        if len(many) > 1:
            raise CannotComputeError("a mask among several tensors, allowed: one mask, or tensors of integers")
        # A mask becomes an index for each of its dimensions.
        size = values.numel() * max(1, *(pick.dim() for pick in many if isinstance(pick, Tensor)))
        return Bound(size, size)
    size = values.numel()
    return _measured_on_meta(operation, (values, tuple(picks)), keywords) if many else Bound(size, size)


def _is_one_integer(value: Value) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (torch.int32, torch.int64)


def _measured_on_meta(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Run the operation on meta tensors, which have a shape but no data, to get the size of its result.

    The work includes the inputs, because the backward pass makes a gradient of their size.
    """
    result = operation(*_without_numbers(tuple(arguments)), **{k: _without_numbers(v) for k, v in keywords.items()})
    size = _numbers_in(shapes_of(result))
    return Bound(size, size + _numbers_in(_all_shapes(arguments, keywords)))


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
        raise CannotComputeError(f"dim is {dim!r}, allowed: a dimension of shape {tuple(shape)}")
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
    """Bound the product of (…, m, k) and (…, k, n). If both are stacks, torch may copy a matrix for every pair."""
    given = _named("input", arguments, keywords)
    shapes = shapes_of([given.pop("input", None), *arguments[1:], *given.values()])
    if len(shapes) != 2 or not all(shapes):
        raise CannotComputeError("it takes two tensors, and none that is a single number")
    left, right = shapes
    pairs = _broadcast_size([left[:-2], right[:-2]])
    rows, inner, columns = _size_at(left, -2), left[-1], right[-1] if len(right) > 1 else 1
    made = pairs * rows * columns
    held = pairs * inner * max(rows, columns) if min(len(left), len(right)) > 2 else 0
    return Bound(max(made, held), made * inner)


def _einsum(_operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Bound by the product of all letters' sizes: no step makes more numbers, and there is one step for each tensor."""
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
    made = math.prod(sizes.values())
    return Bound(made, made * len(terms))


def _attribute(operation: Operation, arguments: Arguments, keywords: Keywords) -> Bound:
    """Bound an attribute: a few numbers, or the tensor itself, transposed."""
    return _same(operation, arguments, keywords) if arguments[1:] in (("T",), ("mT",)) else Bound(1, 1)


def _number(_operation: Operation, _arguments: Arguments, _keywords: Keywords) -> Bound:
    return Bound(1, 1)


# By the name that a rule of the catalog gives as its ``bound``.
BOUNDS: Mapping[str, BoundOf] = {
    "arange": _arange,
    "attribute": _attribute,
    "broadcast": _broadcast,
    "cast": _broadcast,
    "chunk": _chunk,
    "diff": _diff,
    "divided": _divided,
    "einsum": _einsum,
    "index": _index,
    "join": _join,
    "linalg_norm": _linalg_norm,
    "matmul": _matmul,
    "new_sizes": _new_sizes,
    "norm": _norm,
    "number": _number,
    "operator": _broadcast,
    "quantile": _quantile,
    "quotient": _quotient,
    "measured": _measured_on_meta,
    "roll": _roll,
    "same": _same,
    "scanned": _scanned,
    "sizes": _sizes,
    "sorted": _sorted,
    "split": _split,
    "unbind": _unbind,
    "view": _view,
    "where": _where,
}
