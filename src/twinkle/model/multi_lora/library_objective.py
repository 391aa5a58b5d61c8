"""A loss of :mod:`twinkle.loss` as the objective of a Trainer's request: it gets all log-probabilities at once.

Shapes: B sequences, L tokens of the longest.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.loss import CrossEntropyLoss, Loss
from twinkle.model.library.components import loss_value
from twinkle.model.library.optimizer_group import Guard
from twinkle.model.library.sequences import SequenceBatch
from twinkle.model.types import FloatArray, ObjectiveValue, TokenValues


def refuse_unless_logps(loss: Loss) -> None:
    """Raise for a loss that needs more than log-probabilities: a Trainer never holds all logits of a request."""
    if loss.require_logits or loss.require_embeddings or not loss.require_logps:
        raise UnsupportedError(
            f"{type(loss).__name__} needs logits or embeddings, which a multi-LoRA model does not keep; "
            "train it with TransformersModel"
        )


def cross_entropy_weights(loss: Loss, batch: SequenceBatch) -> list[FloatArray] | None:
    """Return weights with which the Trainer's own cross entropy equals ``loss``; None for other losses.

    The Trainer's own loss is faster than an objective: the head runs only once.
    """
    if type(loss) is not CrossEntropyLoss or loss.dft:
        return None
    masks = [(labels != loss.ignore_index).astype(np.float32) for labels in batch.labels]
    count = max(sum(mask.sum() for mask in masks), 1.0) if loss.reduction == "mean" else 1.0
    return [mask / np.float32(count) for mask in masks]


class LibraryObjective:
    """The objective that the Trainer calls between forward and backward pass. Stores the loss's ``num_tokens``."""

    def __init__(self, loss: Loss, batch: SequenceBatch, kwargs: Mapping[str, Any], guard: Guard = nullcontext) -> None:
        self._loss = loss
        self._batch = batch
        self._kwargs = kwargs
        self._guard = guard
        self.num_tokens = 0.0

    def __call__(self, values: Sequence[TokenValues]) -> ObjectiveValue:
        batch, entropy = self._batch, self._loss.require_entropy
        with torch.enable_grad():
            outputs = outputs_of(batch, values, entropy=entropy)
            leaves = [outputs[name].requires_grad_() for name in (("logps", "entropies") if entropy else ("logps",))]
            grads: Sequence[Tensor | None] = [None] * len(leaves)
            with self._guard("the loss failed"):
                loss, self.num_tokens = loss_value(self._loss, batch.loss_inputs, outputs, self._kwargs)
                if loss.requires_grad:
                    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
                slopes = [batch.unpadded(torch.zeros_like(leaves[0]) if grad is None else grad) for grad in grads]
                return ObjectiveValue(float(loss.detach()), slopes[0], slopes[1] if entropy else ())


def outputs_of(
    batch: SequenceBatch, values: Sequence[TokenValues], *, entropy: bool = False, predictions: bool = False
) -> dict[str, Tensor]:
    """Return the outputs of a forward pass for losses and metrics, each (B, L)."""
    outputs = {"logps": batch.padded([value.logprobs for value in values])}
    if entropy:
        outputs["entropies"] = batch.padded([value.entropies for value in values])
    if predictions:
        ids = [torch.from_numpy(value.predictions) for value in values]
        outputs["predictions"] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return outputs
