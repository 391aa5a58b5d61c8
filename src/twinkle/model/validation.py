"""Checks a tenant's request before it joins a batch: every mistake names its field and what is allowed there.

What passes here cannot fail another tenant: shapes agree, token ids exist, numbers are finite.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError
from twinkle.loss import TokenLoss, get_loss, resolve_config
from twinkle.model.types import Datum, FloatArray, IntArray, Objective, TrainItem

_HOTTEST = 1e4  # beyond it every distribution is flat, and a typing mistake likelier than a wish


@dataclass(frozen=True)
class CheckedDatum:
    """tokens (T,) · targets (T, K) · inputs: one float32 array (T, K) a loss input."""

    tokens: IntArray
    targets: IntArray
    inputs: Mapping[str, FloatArray]
    target_shape: tuple[int, ...]


@dataclass(frozen=True)
class CheckedItem:
    """A request that is safe to compute."""

    adapter_id: str
    loss: TokenLoss
    config: Mapping[str, float]
    data: tuple[CheckedDatum, ...]
    objective: Objective | None = None  # in the place of loss
    temperature: float = 1.0
    statistics: bool = False

    @property
    def width(self) -> int:
        """K: targets a token."""
        return max(datum.targets.shape[1] for datum in self.data)


def check_item(item: TrainItem, *, vocab_size: int, max_length: int) -> CheckedItem:
    for field, expected in (("loss", str), ("loss_config", Mapping)):
        if not isinstance(vars(item)[field], expected):
            raise InvalidInputError(field, vars(item)[field], f"a {expected.__name__}")
    loss = get_loss(item.loss)
    config = resolve_config(loss, item.loss_config)
    if not isinstance(item.data, Sequence) or len(item.data) == 0:
        raise InvalidInputError("data", item.data, "a sequence of at least one datum")
    data = tuple(
        _check_datum(datum, f"data[{index}]", loss, vocab_size, max_length) for index, datum in enumerate(item.data)
    )
    _check_options(item, data)
    return CheckedItem(
        item.adapter_id, loss, config, data, item.objective, float(item.temperature), bool(item.statistics)
    )


def _check_options(item: TrainItem, data: Sequence[CheckedDatum]) -> None:
    temperature = item.temperature
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not 0 < temperature <= _HOTTEST:
        raise InvalidInputError("temperature", temperature, f"a number > 0 and at most {_HOTTEST:g}")
    if item.objective is None and not item.statistics:
        return
    if item.objective is not None and item.loss_config:
        raise InvalidInputError("loss_config", item.loss_config, "nothing beside an objective")
    if item.statistics and any(len(datum.target_shape) != 1 for datum in data):
        raise InvalidInputError("targets", "several a token", "one a token with statistics")


def _check_datum(datum: Datum, where: str, loss: TokenLoss, vocab_size: int, max_length: int) -> CheckedDatum:
    if not isinstance(datum, Datum):
        raise InvalidInputError(where, datum, "a Datum")
    if not isinstance(datum.extras, Mapping):
        raise InvalidInputError(f"{where}.extras", datum.extras, "a Mapping from names to arrays")
    tokens = _token_ids(datum.tokens, f"{where}.tokens", vocab_size)
    if tokens.ndim != 1 or not 0 < tokens.shape[0] <= max_length:
        raise InvalidInputError(f"{where}.tokens", f"shape {tokens.shape}", f"(T,) with 1 ≤ T ≤ {max_length}")
    targets = _token_ids(datum.targets, f"{where}.targets", vocab_size)
    length = tokens.shape[0]
    if targets.ndim not in (1, 2) or targets.shape[0] != length or targets.size == 0:
        raise InvalidInputError(f"{where}.targets", f"shape {targets.shape}", f"({length},) or ({length}, K)")
    if targets.ndim == 2 and not loss.allows_topk:
        raise InvalidInputError(f"{where}.targets", f"shape {targets.shape}", f"({length},) for loss {loss.name!r}")
    inputs = _loss_inputs(datum, where, loss, targets.shape)
    return CheckedDatum(tokens, targets.reshape(length, -1), inputs, targets.shape)


def _loss_inputs(datum: Datum, where: str, loss: TokenLoss, shape: tuple[int, ...]) -> dict[str, FloatArray]:
    given = dict(datum.extras)
    if datum.weights is not None:
        given["weights"] = datum.weights
    inputs = {}
    for name in (*loss.inputs, *loss.optional_inputs):
        if name in given:
            inputs[name] = _floats(given[name], f"{where}.{name}", shape)
        elif name in loss.inputs:
            raise InvalidInputError(f"{where}.{name}", None, f"float array {shape}: loss {loss.name!r} needs it")
    low, high = inputs.get("clip_low_threshold"), inputs.get("clip_high_threshold")
    if low is not None and high is not None and (low > high).any():
        raise InvalidInputError(f"{where}.clip_low_threshold", float(low[low > high][0]), "at most clip_high_threshold")
    return inputs


def _token_ids(values: IntArray, field: str, vocab_size: int) -> IntArray:
    array = _array(values, field)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(field, f"dtype {array.dtype}", "an integer array")
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        worst = array.min() if array.min() < 0 else array.max()
        raise InvalidInputError(field, int(worst), f"token ids in [0, {vocab_size})")
    return array.astype(np.int64, copy=False)


def _array(values: object, field: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # ragged lists, for one
        raise InvalidInputError(field, values, "an array of numbers") from error


def _floats(values: FloatArray, field: str, shape: tuple[int, ...]) -> FloatArray:
    array = _array(values, field)
    if array.dtype.kind not in "fiub":
        raise InvalidInputError(field, f"dtype {array.dtype}", "a float array")
    if array.shape != shape:
        raise InvalidInputError(field, f"shape {array.shape}", f"shape {shape}, as targets")
    with np.errstate(over="ignore"):  # a float64 that float32 cannot hold becomes infinite and is refused below
        array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise InvalidInputError(field, float(array[~np.isfinite(array)][0]), "finite numbers")
    return array.reshape(shape[0], -1)
