"""Checks a tenant's request before it joins a batch. Errors name the field and, where possible, what is allowed.

They keep a request from making other tenants' requests fail: shapes agree, token ids exist, numbers are finite.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.csr import Csr, dense, listed
from twinkle.model.types import (
    Datum,
    FloatArray,
    Image,
    IntArray,
    Objective,
    OutputKind,
    RouteArray,
    RoutingSpec,
    TrainItem,
    VisionSpec,
)
from twinkle.model.vision.checks import check_images

if TYPE_CHECKING:
    from twinkle.loss import TokenLoss

NO_COLUMNS: Mapping[OutputKind, int] = MappingProxyType({})
_NO_ROUTES = (
    "this model has no routers to experts whose choice can be recorded and replayed, or runs with Megatron, "
    "which does neither"
)
_TOKENS_AT_ONCE = 1024  # whose routes are compared: few enough for a processor's cache
_HOTTEST = 1e4  # the highest temperature; above it distributions are flat, and the value is probably a mistake


class LossInputs(Protocol):
    """The inputs that a loss needs of each datum; :class:`~twinkle.loss.TokenLoss` implements this."""

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> tuple[str, ...]: ...

    @property
    def optional_inputs(self) -> tuple[str, ...]: ...

    @property
    def allows_topk(self) -> bool: ...


@dataclass(frozen=True)
class CheckedDatum:
    """A datum that was checked: tokens (T,) · targets (T, K) · inputs: one float32 array (T, K) per loss input.

    Sparse arrays stay sparse. ``target_shape`` is the shape that the targets had in the request, (T,) or (T, K).
    """

    tokens: IntArray
    targets: IntArray | Csr
    inputs: Mapping[str, FloatArray | Csr]
    target_shape: tuple[int, ...]
    images: tuple[Image, ...] = ()
    routes: RouteArray | None = None

    @property
    def width(self) -> int:
        """Return K, the number of targets per token."""
        return self.targets.shape[1]


@dataclass(frozen=True)
class CheckedItem:
    """A request that was checked and is safe to compute."""

    adapter_id: str
    loss: "TokenLoss"
    config: Mapping[str, float]
    data: tuple[CheckedDatum, ...]
    objective: Objective | None = None  # used instead of ``loss``
    temperature: float = 1.0
    statistics: bool = False
    output: OutputKind = "logps"
    columns: int = (
        0  # numbers of the output for each of its rows: the vocabulary for logits, hidden size for embeddings
    )
    records_routes: bool = False

    @property
    def width(self) -> int:
        """Return the largest number of targets per token of any datum."""
        return max(datum.width for datum in self.data)


def check_item(
    item: TrainItem,
    *,
    vocab_size: int,
    max_length: int,
    columns: Mapping[OutputKind, int] = NO_COLUMNS,
    vision: VisionSpec | None = None,
    routing: RoutingSpec | None = None,
) -> CheckedItem:
    """Check a request. ``columns``: how many numbers the outputs of the model have, see :class:`CheckedItem`.

    ``vision``: what the model wants of images; None: it reads text only. ``routing``: what its routes look like; None:
    routes are refused.
    """
    from twinkle.loss import get_loss, resolve_config  # imports torch, which check_data does not need

    for field, expected in (("loss", str), ("loss_config", Mapping)):
        if not isinstance(vars(item)[field], expected):
            raise InvalidInputError(field, vars(item)[field], f"a {expected.__name__}")
    loss = get_loss(item.loss)
    config = resolve_config(loss, item.loss_config)
    data = check_data(item.data, loss, vocab_size=vocab_size, max_length=max_length, vision=vision, routing=routing)
    _check_options(item, data)
    check_recording(item.records_routes, routing, "records_routes")
    _check_output(item, data, columns)
    return CheckedItem(
        item.adapter_id,
        loss,
        config,
        data,
        item.objective,
        float(item.temperature),
        bool(item.statistics),
        item.output,
        columns.get(item.output, 0),
        item.records_routes,
    )


def check_data(
    data: Sequence[Datum],
    loss: LossInputs,
    *,
    vocab_size: int,
    max_length: int,
    vision: VisionSpec | None = None,
    routing: RoutingSpec | None = None,
) -> tuple[CheckedDatum, ...]:
    """Check the data of a request for a loss. This does not import torch."""
    if not isinstance(data, Sequence) or len(data) == 0:
        raise InvalidInputError("data", data, "a sequence of at least one datum")
    return tuple(
        _check_datum(datum, f"data[{index}]", loss, vocab_size, max_length, vision, routing)
        for index, datum in enumerate(data)
    )


def _check_options(item: TrainItem, data: Sequence[CheckedDatum]) -> None:
    temperature = item.temperature
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not 0 < temperature <= _HOTTEST:
        raise InvalidInputError("temperature", temperature, f"a number > 0 and at most {_HOTTEST:g}")
    if item.objective is None and not item.statistics:
        return
    if item.objective is not None and item.loss_config:
        raise InvalidInputError("loss_config", item.loss_config, "nothing: an objective has no loss_config")
    if item.statistics and any(len(datum.target_shape) != 1 for datum in data):
        raise InvalidInputError("targets", "several per token", "one per token with statistics")


def _check_output(item: TrainItem, data: Sequence[CheckedDatum], columns: Mapping[OutputKind, int]) -> None:
    if item.output not in get_args(OutputKind):
        raise InvalidInputError("output", item.output, " or ".join(get_args(OutputKind)))
    tokens = sum(len(datum.tokens) for datum in data)
    numbers = tokens * columns.get("logits", 0)
    if item.output == "logits" and numbers > item.max_logits:
        shown = f"{numbers} numbers ({tokens} tokens × {columns['logits']} entries of the vocabulary)"
        raise InvalidInputError("logits", shown, f"at most {item.max_logits} (max_logits_per_request)")


def _check_datum(
    datum: Datum,
    where: str,
    loss: LossInputs,
    vocab_size: int,
    max_length: int,
    vision: VisionSpec | None,
    routing: RoutingSpec | None,
) -> CheckedDatum:
    if not isinstance(datum, Datum):
        raise InvalidInputError(where, datum, "a Datum")
    if not isinstance(datum.extras, Mapping):
        raise InvalidInputError(f"{where}.extras", datum.extras, "a Mapping from names to arrays")
    tokens = dense(_token_ids(datum.tokens, f"{where}.tokens", vocab_size))
    if tokens.ndim != 1 or not 0 < tokens.shape[0] <= max_length:
        raise InvalidInputError(f"{where}.tokens", f"shape {tokens.shape}", f"(T,) with 1 ≤ T ≤ {max_length}")
    targets = _token_ids(datum.targets, f"{where}.targets", vocab_size)
    length = tokens.shape[0]
    if targets.ndim not in (1, 2) or targets.shape[0] != length or targets.size == 0:
        raise InvalidInputError(f"{where}.targets", f"shape {targets.shape}", f"({length},) or ({length}, K)")
    if targets.ndim == 2 and not loss.allows_topk:
        raise InvalidInputError(f"{where}.targets", f"shape {targets.shape}", f"({length},) for loss {loss.name!r}")
    if targets.ndim == 2 and targets.shape[1] > vocab_size:
        raise InvalidInputError(
            f"{where}.targets", f"{targets.shape[1]} per token", f"at most {vocab_size}, the vocabulary size"
        )
    inputs = _loss_inputs(datum, where, loss, targets.shape)
    images = check_images(datum.images, tokens, vision, field=f"{where}.images")
    routes = None if datum.routes is None else check_routes(datum.routes, length, routing, f"{where}.routes")
    return CheckedDatum(tokens, _rows_of(targets), inputs, targets.shape, images, routes)


def check_recording(asked: object, routing: RoutingSpec | None, field: str) -> bool:
    """Return whether routes are asked for. InvalidInputError or UnsupportedError: they cannot be."""
    if not isinstance(asked, bool):
        raise InvalidInputError(field, asked, "True or False")
    if asked and routing is None:
        raise UnsupportedError(f"{field}: {_NO_ROUTES}")
    return asked


def check_routes(values: object, length: int, routing: RoutingSpec | None, field: str) -> RouteArray:
    """Return the experts of a sequence's first tokens, at most ``length``, as an array (T, layers, K).

    The K experts of a token differ, or all are 0: then it has no route there.
    """
    array = _array(values, field)
    if routing is None:
        raise InvalidInputError(field, f"shape {array.shape}", f"nothing, because {_NO_ROUTES}")
    shape = f"(T, {routing.layers}, {routing.chosen}) with 1 ≤ T ≤ {length}: all layers of the decoder, and top-k"
    if isinstance(array, Csr) or array.dtype.kind not in "iu":
        raise InvalidInputError(field, f"dtype {array.dtype}", f"an integer array {shape}")
    if array.ndim != 3 or array.shape[1:] != (routing.layers, routing.chosen) or not 1 <= len(array) <= length:
        raise InvalidInputError(field, f"shape {array.shape}", shape)
    if array.min() < 0 or array.max() >= routing.experts:
        worst = array.min() if array.min() < 0 else array.max()
        raise InvalidInputError(field, int(worst), f"numbers of experts in [0, {routing.experts})")
    routes = array.astype(np.int16)
    parts = [_chosen_twice(routes[start : start + _TOKENS_AT_ONCE]) for start in range(0, length, _TOKENS_AT_ONCE)]
    twice = np.argwhere(np.concatenate(parts)[:, list(routing.routed)])
    if len(twice):
        token, layer = twice[0][0].item(), routing.routed[twice[0][1]]
        given = f"{routes[token, layer].tolist()} for token {token} in layer {layer}"
        raise InvalidInputError(field, given, "experts that differ, or zeros alone for a token without a route")
    return routes


def _chosen_twice(routes: RouteArray) -> NDArray[np.bool_]:
    """Return where a token has an expert twice, (T, layers); not where all are 0.

    It compares whole choices, (T, layers) each: sorting the experts of each token would take several times as long.
    """
    choices = np.ascontiguousarray(routes.transpose(2, 0, 1))
    twice, some = np.zeros(routes.shape[:2], bool), choices[0] != 0
    for last in range(1, len(choices)):
        some |= choices[last] != 0
        for earlier in choices[:last]:
            twice |= earlier == choices[last]
    return twice & some


def _loss_inputs(datum: Datum, where: str, loss: LossInputs, shape: tuple[int, ...]) -> dict[str, FloatArray | Csr]:
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
    if low is not None and high is not None:
        lows = dense(low)
        if (lows > dense(high)).any():
            worst = float(lows[lows > dense(high)][0])
            raise InvalidInputError(f"{where}.clip_low_threshold", worst, "at most clip_high_threshold")
    return inputs


def _token_ids(values: IntArray | Csr, field: str, vocab_size: int) -> IntArray | Csr:
    array = _array(values, field)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(field, f"dtype {array.dtype}", "an integer array")
    ids = listed(array)  # cells that are not listed are token 0, which every model has
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise InvalidInputError(field, int(worst), f"token ids in [0, {vocab_size})")
    return array.astype(np.int64) if isinstance(array, Csr) else array.astype(np.int64, copy=False)


def _array(values: object, field: str) -> NDArray[Any] | Csr:
    if isinstance(values, Csr):
        return values
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # for example ragged lists
        raise InvalidInputError(field, values, "an array of numbers") from error


def _floats(values: FloatArray | Csr, field: str, shape: tuple[int, ...]) -> FloatArray | Csr:
    array = _array(values, field)
    if array.dtype.kind not in "fiub":
        raise InvalidInputError(field, f"dtype {array.dtype}", "a float array")
    if array.shape != shape:
        raise InvalidInputError(field, f"shape {array.shape}", f"shape {shape}, that of the targets")
    with np.errstate(over="ignore"):  # a float64 that float32 cannot hold becomes infinite and is refused below
        array = array.astype(np.float32) if isinstance(array, Csr) else array.astype(np.float32, copy=False)
    numbers = listed(array)
    if not np.isfinite(numbers).all():
        raise InvalidInputError(field, float(numbers[~np.isfinite(numbers)][0]), "finite numbers")
    return _rows_of(array)


def _rows_of(array: NDArray[Any] | Csr) -> NDArray[Any] | Csr:
    """Return an array as (T, K); an array of one dimension becomes (T, 1)."""
    return array if isinstance(array, Csr) else array.reshape(array.shape[0], -1)


_DATUM_FIELD = re.compile(r"data\[(\d+)\]\.(tokens|targets|routes)")
_ROW_FIELDS = {"tokens": "input_ids", "targets": "labels", "routes": "routed_experts"}


def in_terms_of_rows(error: Exception) -> Exception:
    """Return an error about a datum as one about the row that it was made from; other errors unchanged.

    A row has ``input_ids`` and ``labels``. A packed row is several datums, so the number is that of the sequence.
    """
    of_datum = _DATUM_FIELD.fullmatch(error.field) if isinstance(error, InvalidInputError) else None
    if of_datum is None or not isinstance(error, InvalidInputError):
        return error
    return error.renamed(f"{_ROW_FIELDS[of_datum[2]]} of sequence {of_datum[1]}")
