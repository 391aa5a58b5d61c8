"""From log-probabilities to losses: what the requests of one batch ask for, token by token.

Consecutive requests with the same loss are evaluated together, each token with its own tenant's configuration.

Shapes: n tokens of a run or request, K targets a token, C rows of a head chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from twinkle.loss import TokenLoss, coefficients
from twinkle.model.transfer import to_device
from twinkle.model.types import FloatArray
from twinkle.model.validation import CheckedDatum, CheckedItem


@dataclass(frozen=True)
class LossRun:
    """Rows ``start``…``stop`` share a loss. Inputs are (n,), or (n, K) where the loss allows several targets."""

    loss: TokenLoss
    start: int
    stop: int
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """The losses of one batch of rows."""

    runs: tuple[LossRun, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[CheckedItem, Sequence[CheckedDatum]]], width: int) -> "Objective":
        """``parts``: the requests in row order, each with those of its sequences that are in this batch."""
        runs, start = [], 0
        for name, run in groupby(parts, key=lambda part: part[0].loss.name):
            members = list(run)
            columns = [_inputs(item, data, width) for item, data in members]
            inputs = {key: np.concatenate([column[key] for column in columns]) for key in columns[0]}
            if not members[0][0].loss.pointwise:
                inputs["sequence"] = _sequence_numbers([datum for _, data in members for datum in data])
            stop = start + sum(len(datum.tokens) for _, data in members for datum in data)
            tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
            runs.append(LossRun(members[0][0].loss, start, stop, tensors))
            assert name == members[0][0].loss.name
            start = stop
        return cls(tuple(runs))

    @property
    def pointwise(self) -> bool:
        return all(run.loss.pointwise for run in self.runs)

    def to(self, device: torch.device) -> "Objective":
        moved = [
            LossRun(run.loss, run.start, run.stop, {key: to_device(value, device) for key, value in run.inputs.items()})
            for run in self.runs
        ]
        return Objective(tuple(moved))

    def coefficients(self, start: int, stop: int, logprobs_CK: Tensor) -> Tensor:
        """dL/dlp of the rows ``start``…``stop``, (C, K)."""
        result_CK = torch.zeros_like(logprobs_CK)
        for run in self.runs:
            low, high = max(start, run.start), min(stop, run.stop)
            if low < high:
                inputs = {key: value[low - run.start : high - run.start] for key, value in run.inputs.items()}
                rows = slice(low - start, high - start)
                lp = logprobs_CK[rows] if run.loss.allows_topk else logprobs_CK[rows, 0]
                gradient = coefficients(run.loss, lp, inputs)
                result_CK[rows, : gradient.shape[1] if gradient.ndim == 2 else 1] = gradient.reshape(high - low, -1)
        return result_CK


def evaluate(item: CheckedItem, logprobs: Sequence[FloatArray]) -> dict[str, float]:
    """The metrics of one whole request from the log-probabilities of all its sequences, each (T, K)."""
    inputs = {key: torch.from_numpy(value) for key, value in _inputs(item, item.data, item.width).items()}
    if not item.loss.pointwise:
        inputs["sequence"] = torch.from_numpy(_sequence_numbers(item.data))
    flat = torch.from_numpy(np.concatenate([_widened(lp, item.width) for lp in logprobs]))
    lp = flat if item.loss.allows_topk else flat[:, 0]
    loss = item.loss.terms(lp, inputs).double().sum().item()
    return {"loss:sum": loss, **item.loss.diagnostics(lp, inputs)}


def _inputs(item: CheckedItem, data: Sequence[CheckedDatum], width: int) -> dict[str, FloatArray]:
    """Every input and configuration value of the loss for each token; targets beyond a datum's own K weigh nothing."""
    defaults = {**item.config, "weights": 1.0} if "weights" in item.loss.optional_inputs else dict(item.config)
    columns = {}
    for name in (*item.loss.inputs, *defaults):
        parts = [
            datum.inputs[name] if name in datum.inputs else np.full(datum.targets.shape, defaults[name], np.float32)
            for datum in data
        ]
        column = np.concatenate([_widened(part, width) for part in parts])
        columns[name] = column if item.loss.allows_topk else column[:, 0].copy()
    return columns


def _widened(array_TK: FloatArray, width: int) -> FloatArray:
    missing = width - array_TK.shape[1]
    return array_TK if missing == 0 else np.pad(array_TK, ((0, 0), (0, missing)))


def _sequence_numbers(data: Sequence[CheckedDatum]) -> np.ndarray:
    return np.repeat(np.arange(len(data)), [len(datum.tokens) for datum in data])
