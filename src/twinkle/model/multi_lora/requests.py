"""Converts a batch of the library to a request of the Trainer, and its result to the outputs for losses and metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from twinkle.errors import InvalidInputError
from twinkle.loss import GKDLoss
from twinkle.metric import Accuracy
from twinkle.model.library.optimizer_group import OptimizerGroup, TrainStatus
from twinkle.model.library.router_replay import padded_routes, routes_of
from twinkle.model.library.sequences import ROUTES, SequenceBatch
from twinkle.model.multi_lora.library_objective import (
    LibraryObjective,
    TopkObjective,
    TopkTeacher,
    cross_entropy_weights,
    outputs_of,
)
from twinkle.model.types import Datum, FloatArray, OutputKind, TokenValues, TrainItem, TrainResult

_NONE = np.zeros(0, np.float32)
_NO_IDS = np.zeros(0, np.int64)


class SizedTrainer(Protocol):
    def vocabulary_size(self) -> int: ...


@dataclass(frozen=True)
class TrainRequest:
    """A request of one forward and backward pass.

    ``num_tokens`` may be called once the pass has run. It returns the tokens that the loss is a sum over; 0 for a mean.
    """

    item: TrainItem
    num_tokens: Callable[[], float]


class LoraRequests:
    """Makes requests of the Trainer from batches, and outputs of verbs from its results."""

    def __init__(self, trainer: SizedTrainer, max_length: int, max_logits: int) -> None:
        self._trainer = trainer
        self._max_length = max_length
        self._max_logits = max_logits

    def forward_item(
        self,
        group: OptimizerGroup,
        status: TrainStatus,
        batch: SequenceBatch,
        temperature: float,
        output: OutputKind,
        *,
        without_adapter: bool,
        training: bool,
        records_routes: bool = False,
    ) -> TrainItem:
        """Return the request of a forward pass. ``training``: with dropout, as the backward pass that may follow."""
        return TrainItem(
            group.adapter_name,
            self._data(batch),
            temperature=temperature,
            statistics=_needs_statistics(group, status),
            base_model=without_adapter,
            output=output,
            max_logits=self._max_logits,
            training=training and not without_adapter,
            records_routes=records_routes,
        )

    def train_request(
        self,
        group: OptimizerGroup,
        batch: SequenceBatch,
        temperature: float,
        kwargs: Mapping[str, Any],
        output: OutputKind,
        *,
        returned: bool = False,
        records_routes: bool = False,
    ) -> TrainRequest:
        """Return the request. ``returned``: the caller asked for the output, so it is computed in any case."""
        loss, statistics = group.loss_instance, _needs_statistics(group, group.train_status)
        teacher = None
        with group.guard("the loss failed"):
            weights = None if output == "embeddings" else cross_entropy_weights(loss, batch)
            # A token with several targets has no statistics: the Trainer computes all logits then.
            if isinstance(loss, GKDLoss) and not (returned or statistics or batch.empty):
                teacher = TopkTeacher.read(batch, kwargs, self._trainer.vocabulary_size())
        objective: LibraryObjective | TopkObjective
        if teacher is not None:
            objective, output = TopkObjective(loss, batch, teacher, group.guard), "logps"
        else:
            objective = LibraryObjective(loss, batch, kwargs, group.guard, output)
        item = TrainItem(
            group.adapter_name,
            self._data(batch, weights, teacher),
            objective=objective if weights is None else None,
            temperature=temperature,
            statistics=statistics,
            output=output,
            max_logits=self._max_logits,
            records_routes=records_routes,
        )

        def num_tokens() -> float:
            if batch.empty:
                return 0.0
            if weights is None:
                return objective.num_tokens
            return max(float(sum(each.sum() for each in weights)), 1.0) if loss.reduction == "sum" else 0.0

        return TrainRequest(item, num_tokens)

    def outputs(
        self,
        group: OptimizerGroup,
        status: TrainStatus,
        batch: SequenceBatch,
        result: TrainResult,
        output: OutputKind,
    ) -> dict[str, Any]:
        if batch.empty:
            return {"logps": torch.zeros(0, 0)}
        # Of several targets per token, the first is the label.
        logprobs = [each if each.ndim == 1 else np.ascontiguousarray(each[:, 0]) for each in result.logprobs]
        values = result.values or [TokenValues(each, _NONE, _NO_IDS) for each in logprobs]
        entropy = group.loss_instance.require_entropy
        outputs = outputs_of(batch, values, output, entropy=entropy, predictions=_has_accuracy(status))
        return {**outputs, ROUTES: padded_routes(list(result.routes))} if result.routes else {**outputs}

    def _data(
        self, batch: SequenceBatch, weights: list[FloatArray] | None = None, teacher: TopkTeacher | None = None
    ) -> list[Datum]:
        longest = max(batch.lengths, default=0)
        if longest > self._max_length:
            allowed = f"at most max_length={self._max_length}"
            raise InvalidInputError("inputs", f"a sequence of {longest} tokens", allowed)
        each = [None] * len(batch.lengths) if weights is None else weights
        targets = batch.targets
        if teacher is not None:
            tokens = batch.unpadded(teacher.tokens_BLK)
            targets = [np.column_stack([own, more]) for own, more in zip(targets, tokens, strict=True)]
        images = batch.images or [()] * len(targets)
        return [
            Datum(own_tokens, own_targets, own_weights, images=own_images, routes=own_routes)
            for own_tokens, own_targets, own_weights, own_images, own_routes in zip(
                batch.tokens, targets, each, images, routes_of(batch), strict=True
            )
        ]


def _needs_statistics(group: OptimizerGroup, status: TrainStatus) -> bool:
    return group.loss_instance.require_entropy or _has_accuracy(status)


def _has_accuracy(status: TrainStatus) -> bool:
    return any(isinstance(metric, Accuracy) for metric in status.metrics)
