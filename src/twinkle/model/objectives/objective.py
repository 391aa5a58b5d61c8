"""From log-probabilities to losses: the losses of all requests of one batch, token by token.

Consecutive requests with the same named loss are evaluated together, each token with its own tenant's configuration.

A loss is pointwise if dL/dlp of a token depends on that token alone. Coefficients are dL/dvalue.

Shapes: n tokens of a span or request, K targets per token, C rows of a head chunk, M values of a row (log-probabilities
of K targets and, if any request of the batch asked for them, statistics).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from twinkle.loss import TokenLoss, coefficients
from twinkle.model.csr import dense
from twinkle.model.decoder.transfer import to_device
from twinkle.model.objectives.validation import CheckedDatum, CheckedItem
from twinkle.model.types import FloatArray

_MOST_CELLS = 2**20  # targets whose loss is computed at once by `evaluate`


@dataclass(frozen=True)
class LossSpan:
    """Rows ``start``…``stop`` share a loss. Inputs are (n,), or (n, K) where the loss allows several targets."""

    loss: TokenLoss
    start: int
    stop: int
    inputs: Mapping[str, Tensor]

    @classmethod
    def from_parts(cls, members: Sequence["LossPart"], start: int) -> "LossSpan":
        loss = members[0].item.loss
        data = [datum for part in members for datum in part.data]
        columns = [_inputs(part.item, part.data) for part in members]
        inputs = {key: np.concatenate([column[key] for column in columns]) for key in columns[0]}
        if not loss.pointwise:
            inputs["sequence"] = _sequence_numbers(data)
        tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
        return cls(loss, start, start + sum(sum(part.lengths) for part in members), tensors)

    @property
    def pointwise(self) -> bool:
        return self.loss.pointwise

    def record_values(self, values_nM: Tensor, width: int) -> None:
        """Do nothing: a named loss gets the values it needs as an argument of :meth:`coefficients`."""

    def to(self, device: torch.device) -> "LossSpan":
        return replace(self, inputs={key: to_device(value, device) for key, value in self.inputs.items()})

    def coefficients(self, low: int, high: int, values_CM: Tensor, width: int) -> Tensor:
        inputs = {key: value[low - self.start : high - self.start] for key, value in self.inputs.items()}
        lp = values_CM[:, :width] if self.loss.allows_topk else values_CM[:, 0]
        return coefficients(self.loss, lp, inputs).reshape(high - low, -1)


class CustomLoss(Protocol):
    """The objective of one request, used instead of a named loss.

    Rows are counted from the request's first row in the block.
    """

    @property
    def pointwise(self) -> bool: ...

    def record_values(self, values_nM: Tensor, width: int) -> None:
        """Take the values of all rows of this object. If it is not pointwise, this comes before :meth:`coefficients`.

        A request whose rows are in several blocks has one such object per block; each gets the values of its own rows.
        """
        ...

    def coefficients(self, start: int, stop: int, values_CM: Tensor, width: int) -> Tensor:
        """Return dL/dvalue of these rows, (C, M) with K = ``width``."""
        ...


@dataclass(frozen=True)
class CustomLossSpan:
    """Rows ``start``…``stop`` belong to one request with an objective."""

    custom: CustomLoss
    start: int
    stop: int

    @property
    def pointwise(self) -> bool:
        return self.custom.pointwise

    def record_values(self, values_nM: Tensor, width: int) -> None:
        self.custom.record_values(values_nM, width)

    def to(self, device: torch.device) -> "CustomLossSpan":
        return self  # a CustomLoss moves its coefficients to the device itself

    def coefficients(self, low: int, high: int, values_CM: Tensor, width: int) -> Tensor:
        return self.custom.coefficients(low - self.start, high - self.start, values_CM, width)


@dataclass(frozen=True)
class LossPart:
    """The sequences of one request that are in one block of a batch."""

    item: CheckedItem
    data: Sequence[CheckedDatum]
    custom: CustomLoss | None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return how many rows of values each sequence has: one for each token, or a single one for its embedding."""
        if self.item.output == "embeddings":
            return (1,) * len(self.data)
        return tuple(len(datum.tokens) for datum in self.data)

    @property
    def kind(self) -> str:
        """Return a key: neighbouring parts with equal keys are evaluated together."""
        return self.item.loss.name if self.custom is None else f"custom {id(self.custom)}"


@dataclass(frozen=True)
class BatchObjective:
    """The losses of one block of rows, all of which have ``width`` targets (K)."""

    spans: tuple[LossSpan | CustomLossSpan, ...]
    width: int

    @classmethod
    def from_parts(cls, parts: Sequence[LossPart], width: int) -> "BatchObjective":
        """Group neighbouring parts with the same loss. ``parts`` are in row order."""
        spans: list[LossSpan | CustomLossSpan] = []
        start = 0
        for _, span in groupby(parts, key=lambda part: part.kind):
            members = list(span)
            custom = members[0].custom
            if custom is None:
                spans.append(LossSpan.from_parts(members, start))
            else:
                spans.append(CustomLossSpan(custom, start, start + sum(members[0].lengths)))
            start = spans[-1].stop
        return cls(tuple(spans), width)

    @property
    def pointwise(self) -> bool:
        return all(span.pointwise for span in self.spans)

    def to(self, device: torch.device) -> "BatchObjective":
        return replace(self, spans=tuple(span.to(device) for span in self.spans))

    def record_values(self, values_nM: Tensor) -> None:
        """Give every loss the values of its rows in this block."""
        for span in self.spans:
            span.record_values(values_nM[span.start : span.stop], self.width)

    def coefficients(self, start: int, stop: int, values_CM: Tensor) -> Tensor:
        """Return dL/dvalue of the rows ``start``…``stop``, (C, M)."""
        result_CM = torch.zeros_like(values_CM)
        for span in self.spans:
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                rows = slice(low - start, high - start)
                gradient = span.coefficients(low, high, values_CM[rows], self.width)
                result_CM[rows, : gradient.shape[1]] = gradient
        return result_CM


def evaluate(item: CheckedItem, logprobs: Sequence[FloatArray]) -> dict[str, float]:
    """Return the metrics of a whole request from the log-probabilities of all its sequences, each (T, K).

    A loss that allows several targets per token is a sum, so it is computed in pieces of equal width: the sparse inputs
    of a large request are not all written out at once. Such losses have no diagnostics.
    """
    pieces = list(_pieces(item.data)) if item.loss.allows_topk else [range(len(item.data))]
    losses, metrics = [], {}
    for numbers in pieces:
        data = [item.data[number] for number in numbers]
        inputs = {key: torch.from_numpy(value) for key, value in _inputs(item, data).items()}
        if not item.loss.pointwise:
            inputs["sequence"] = torch.from_numpy(_sequence_numbers(data))
        flat = torch.from_numpy(np.concatenate([logprobs[number] for number in numbers]))
        lp = flat if item.loss.allows_topk else flat[:, 0]
        losses.append(item.loss.terms(lp, inputs).double().sum().item())
        metrics = item.loss.diagnostics(lp, inputs)
    return {"loss:sum": losses[0] if len(losses) == 1 else math.fsum(losses), **metrics}


def _pieces(data: Sequence[CheckedDatum]) -> Iterator[range]:
    """Yield ranges of neighbouring sequences of equal width with at most ``_MOST_CELLS`` cells, or one sequence."""
    start = cells = 0
    for number, datum in enumerate(data):
        differs = datum.width != data[start].width
        if number > start and (differs or cells + datum.targets.size > _MOST_CELLS):
            yield range(start, number)
            start, cells = number, 0
        cells += datum.targets.size
    yield range(start, len(data))


def _inputs(item: CheckedItem, data: Sequence[CheckedDatum]) -> dict[str, FloatArray]:
    """Return every input and configuration value of the loss, per token. All sequences must have the same width."""
    defaults = {**item.config, "weights": 1.0} if "weights" in item.loss.optional_inputs else dict(item.config)
    columns = {}
    for name in (*item.loss.inputs, *defaults):
        parts = [
            dense(datum.inputs[name])
            if name in datum.inputs
            else np.full(datum.targets.shape, defaults[name], np.float32)
            for datum in data
        ]
        column = np.concatenate(parts)
        columns[name] = column if item.loss.allows_topk else column[:, 0].copy()
    return columns


def _sequence_numbers(data: Sequence[CheckedDatum]) -> np.ndarray:
    return np.repeat(np.arange(len(data)), [len(datum.tokens) for datum in data])
