"""The functions behind the operations of the catalog."""

import math
import operator
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.loss.graph.bounds import CannotComputeError, Value, shapes_of
from twinkle.loss.graph.catalog import ATTRIBUTES, CATALOG, DTYPES

__all__ = ["OPERATIONS", "as_dtype"]

_MAX_EXPONENT = 64


# --- operators and functions of Python --------------------------------------------------------------------------------


def _operator(name: str) -> Callable[..., Value]:
    function = vars(operator)[name]

    def compute(*operands: Value) -> Value:
        for operand in operands:
            if not isinstance(operand, Tensor | int | float):
                raise CannotComputeError(f"it takes tensors and numbers, not {type(operand).__name__}")
        if name == "pow" and not any(isinstance(operand, Tensor) for operand in operands):
            return _power(*operands)
        return function(*operands)

    return compute


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and 0 <= exponent <= _MAX_EXPONENT:
        return base**exponent
    return math.pow(base, exponent)


def _getitem(values: Value, index: Value) -> Value:
    if isinstance(values, tuple) and isinstance(index, int | slice):  # a shape, or the result of max or sort
        return values[index]
    if not isinstance(values, Tensor):
        raise CannotComputeError(f"{type(values).__name__} has no elements")
    return values[index]


def _of_numbers(name: str) -> Callable[..., Value]:
    function = vars(math)[name]

    def compute(*numbers: Value) -> Value:
        for number in numbers:
            if not isinstance(number, int | float):
                raise CannotComputeError("it takes numbers; a tensor's value cannot leave its tensor (use torch's)")
        return function(*numbers)

    return compute


# --- operations with checks of their own ------------------------------------------------------------------------------


def as_dtype(name: str) -> torch.dtype:
    assert name in DTYPES
    dtype: torch.dtype = vars(torch)[name]
    return dtype


def _attribute(value: Value, name: Value) -> Value:
    if name not in ATTRIBUTES:
        raise CannotComputeError(f"attribute {name!r}, allowed: {', '.join(ATTRIBUTES)}")
    if name in ("values", "indices"):
        if not isinstance(value, tuple) or not all(isinstance(each, Tensor) for each in value) or len(value) != 2:
            raise CannotComputeError(f"only what max, min, median, sort and topk return has {name}")
        return value[0 if name == "values" else 1]
    if not isinstance(value, Tensor):
        raise CannotComputeError(f"only a tensor has {name}")
    if name == "shape":
        return tuple(value.shape)
    found = {"T": _transposed, "mT": _transposed, "ndim": Tensor.dim}
    if name in found:
        return found[name](value)
    return value.dtype if name == "dtype" else torch.device("cpu")


def _transposed(values: Tensor) -> Tensor:
    if values.dim() > 2:
        raise CannotComputeError("only vectors and matrices are transposed")
    return values.t()


def _to(values: Tensor, *targets: Value, **keywords: Value) -> Tensor:
    """Change the dtype. The device stays the CPU; any other is refused."""
    for target in (*targets, *keywords.values()):
        if isinstance(target, Tensor):
            values = values.to(target.dtype)
        elif isinstance(target, torch.dtype):
            values = values.to(target)
        elif target != "cpu" and target != torch.device("cpu") and target is not None and type(target) is not bool:
            raise CannotComputeError(f"to {target!r}, allowed: a dtype, another tensor, or cpu")
    return values


def _type(values: Tensor, dtype: Value) -> Tensor:
    if not isinstance(dtype, torch.dtype):
        raise CannotComputeError(f"type {dtype!r}, allowed: a dtype")
    return values.to(dtype)


def _size(values: Tensor, *dim: int, **keywords: int) -> Value:
    """Return the shape as a plain tuple, or one of its numbers."""
    size = values.size(*dim, **keywords)
    return size if isinstance(size, int) else tuple(size)


def _literal(data: Value, **keywords: Value) -> Tensor:
    if shapes_of(data):
        raise CannotComputeError("it takes numbers; for tensors use torch.stack")
    return torch.tensor(data, **keywords)


def _new_literal(like: Tensor, data: Value, **keywords: Value) -> Tensor:
    return _literal(data, **{"dtype": like.dtype, **keywords})


def _tuple(function: Callable[..., Value]) -> Callable[..., Value]:
    """Wrap a function so that it returns a plain tuple instead of torch's own sequence type."""
    return lambda *arguments, **keywords: tuple(function(*arguments, **keywords))


_SPECIAL: Mapping[str, Callable[..., Value]] = {
    "getattr": _attribute,
    "operator.getitem": _getitem,
    "torch.tensor": _literal,
    "torch.as_tensor": _literal,
    "torch.functional.einsum": torch.einsum,
    "torch.functional.norm": torch.norm,
    "torch.functional.split": _tuple(torch.split),
    "torch._C._linalg.linalg_norm": torch.linalg.norm,
    "torch.linalg.norm": torch.linalg.norm,
    "torch._C._linalg.linalg_vector_norm": torch.linalg.vector_norm,
    "torch.linalg.vector_norm": torch.linalg.vector_norm,
    "torch._C._nn.gelu": F.gelu,
    "torch._C._nn.softplus": F.softplus,
    "torch._C._nn.log_sigmoid": F.logsigmoid,
    "torch.nn.functional.sigmoid": torch.sigmoid,
    "torch.nn.functional.tanh": torch.tanh,
    "torch._C._special.special_entr": torch.special.entr,
    "torch._C._special.special_expit": torch.special.expit,
    "torch._C._special.special_expm1": torch.special.expm1,
    "torch._C._special.special_log1p": torch.special.log1p,
    "torch._C._special.special_log_softmax": torch.special.log_softmax,
    "torch._C._special.special_logsumexp": torch.special.logsumexp,
    "torch._C._special.special_softmax": torch.special.softmax,
    "torch._C._special.special_xlogy": torch.special.xlogy,
    ".cpu": _to,
    ".new_tensor": _new_literal,
    ".size": _size,
    ".split": _tuple(torch.split),
    ".to": _to,
    ".type": _type,
}


def _computes(target: str) -> Callable[..., Value]:
    if target in _SPECIAL:
        return _SPECIAL[target]
    home, _, name = target.rpartition(".")
    if home == "operator":
        return _operator(name)
    if home == "math":
        return _of_numbers(name)
    if home == "":
        method: Callable[..., Value] = getattr(Tensor, name)
        return method
    function: Callable[..., Value] = vars({"torch": torch, "torch.nn.functional": F}[home])[name]
    return function


# Resolved once, from the catalog's own names: a name sent by a tenant is only ever looked up in this table.
OPERATIONS: Mapping[str, Callable[..., Value]] = {target: _computes(target) for target in CATALOG}
