"""A loss of :mod:`twinkle.loss` as the objective of a Trainer's request: it gets the values of all sequences at once.

Shapes: B sequences, L tokens of the longest, V vocabulary, H hidden features, K likeliest tokens of a teacher.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.loss import (
    ChunkedCrossEntropyLoss,
    CrossEntropyLoss,
    GKDLoss,
    LigerFusedLinearCrossEntropyLoss,
    Loss,
)
from twinkle.loss.distillation import NEVER, read_teacher
from twinkle.model.library.components import loss_value
from twinkle.model.library.optimizer_group import Guard
from twinkle.model.library.sequences import SequenceBatch
from twinkle.model.types import FloatArray, ObjectiveValue, OutputKind, TokenValues

_TASKS = ("causal_lm", "embedding")


def needs_logits(loss: Loss) -> bool:
    """Return whether a loss reads logits. Cross entropies that ask for them need only log-probabilities.

    A Trainer holds the logits of a request only if they are asked for, and only up to a limit.
    """
    return loss.require_logits and not isinstance(loss, ChunkedCrossEntropyLoss | LigerFusedLinearCrossEntropyLoss)


def wanted_output(loss: Loss, task: str, *, return_logits: bool) -> OutputKind:
    """Return what a pass has to compute for the loss and for the caller, beside log-probabilities."""
    if task not in _TASKS:
        raise UnsupportedError(f"task: got {task!r}, a multi-LoRA model does {' and '.join(map(repr, _TASKS))}")
    if task == "embedding":
        if return_logits:
            raise InvalidInputError("return_logits", True, "False with task='embedding', which computes no logits")
        return "embeddings"
    return "logits" if return_logits or needs_logits(loss) else "logps"


def check_task(loss: Loss, task: str) -> None:
    """Raise if the loss reads embeddings and the task computes none, or the reverse."""
    if loss.require_embeddings != (task == "embedding"):
        allowed = "'embedding'" if loss.require_embeddings else "'causal_lm'"
        raise InvalidInputError("task", task, f"{allowed} with {type(loss).__name__}")


def cross_entropy_weights(loss: Loss, batch: SequenceBatch) -> list[FloatArray] | None:
    """Return weights with which the Trainer's own cross entropy equals ``loss``; None for other losses.

    The Trainer's own loss is faster than an objective: the head runs only once.
    """
    if type(loss) not in (CrossEntropyLoss, ChunkedCrossEntropyLoss):
        return None
    assert isinstance(loss, CrossEntropyLoss | ChunkedCrossEntropyLoss)
    if loss.dft:
        return None
    masks = [(labels != loss.ignore_index).astype(np.float32) for labels in batch.labels]
    count = max(sum(mask.sum() for mask in masks), 1.0) if loss.reduction == "mean" else 1.0
    return [mask / np.float32(count) for mask in masks]


class LibraryObjective:
    """The objective that the Trainer calls between forward and backward pass. Stores the loss's ``num_tokens``."""

    def __init__(
        self,
        loss: Loss,
        batch: SequenceBatch,
        kwargs: Mapping[str, Any],
        guard: Guard = nullcontext,
        output: OutputKind = "logps",
    ) -> None:
        """``output``: what the request asks the Trainer for beside log-probabilities."""
        self._output = output
        self._loss = loss
        self._batch = batch
        self._kwargs = kwargs
        self._guard = guard
        self.num_tokens = 0.0

    def __call__(self, values: Sequence[TokenValues]) -> ObjectiveValue:
        batch, entropy = self._batch, self._loss.require_entropy
        with torch.enable_grad():
            leaves = leaves_of(batch, values, self._output, entropy=entropy)
            for leaf in leaves.values():
                leaf.requires_grad_()
            with self._guard("the loss failed"):
                outputs = finished(leaves)
                loss, self.num_tokens = loss_value(self._loss, batch.loss_inputs, outputs, self._kwargs)
                grads = _slopes(loss, leaves)
            none = [np.zeros_like(value.logprobs) for value in values]
            return ObjectiveValue(
                float(loss.detach()),
                batch.unpadded(grads["logps"]) if "logps" in grads else none,
                batch.unpadded(grads["entropies"]) if entropy else (),
                outputs=self._output_slopes(grads),
            )

    def _output_slopes(self, grads: Mapping[str, Tensor]) -> Sequence[FloatArray]:
        if "logits" in grads:
            return self._batch.unpadded(grads["logits"])
        return [row_1H.numpy() for row_1H in grads["hidden"].split(1)] if "hidden" in grads else ()


class TopkObjective:
    """GKD with the teacher's likeliest K tokens: needs the student's log-probabilities of those alone, not all logits.

    S is a softmax over the K entries, which does not change if one number is added to all of their logits. So the
    log-probabilities that the Trainer computes for K targets of a token serve as logits.
    """

    def __init__(self, loss: Loss, batch: SequenceBatch, teacher: "TopkTeacher", guard: Guard = nullcontext) -> None:
        self._loss = loss
        self._batch = batch
        self._teacher = teacher
        self._guard = guard
        self.num_tokens = 0.0

    def __call__(self, values: Sequence[TokenValues]) -> ObjectiveValue:
        batch, teacher = self._batch, self._teacher
        with torch.enable_grad():
            # column 0 is the label, whose log-probability is only reported
            leaf_BLK = batch.padded([value.logprobs[:, 1:] for value in values]).requires_grad_()
            with self._guard("the loss failed"):
                # The student's vocabulary may be smaller than the teacher's: its entries beyond are impossible.
                logits_BLK = torch.where(teacher.known_BLK, leaf_BLK, NEVER)
                arguments = {"teacher_topk_logprobs": teacher.logprobs_BLK, "teacher_topk_indices": teacher.places}
                loss, self.num_tokens = loss_value(self._loss, batch.loss_inputs, {"logits": logits_BLK}, arguments)
                slopes = batch.unpadded(_slopes(loss, {"logits": leaf_BLK})["logits"])
            return ObjectiveValue(float(loss.detach()), [np.pad(slope, ((0, 0), (1, 0))) for slope in slopes])


@dataclass(frozen=True)
class TopkTeacher:
    """A teacher's likeliest tokens at each position of a batch, as tensors (B, L, K)."""

    logprobs_BLK: Tensor
    tokens_BLK: Tensor  # ids of the student's vocabulary; 0 where the student lacks the token
    known_BLK: Tensor  # False where the student lacks the token

    @classmethod
    def read(cls, batch: SequenceBatch, kwargs: Mapping[str, Any], vocab_size: int) -> "TopkTeacher | None":
        """Read the teacher from the arguments of a pass. None: it is given with its whole vocabulary."""
        given = read_teacher(**{name: kwargs.get(name) for name in GKDLoss.call_arguments})
        if given.indices is None:
            return None
        logprobs, indices = given.for_batch(len(batch.lengths), max(batch.lengths))
        assert indices is not None
        known = indices < vocab_size
        return cls(logprobs.float(), torch.where(known, indices, 0), known)

    @property
    def places(self) -> Tensor:
        """Return 0, 1 … K − 1 at each position: the entries of the student's logits are in the teacher's order."""
        return torch.arange(self.tokens_BLK.shape[-1]).expand(self.tokens_BLK.shape)


def leaves_of(
    batch: SequenceBatch, values: Sequence[TokenValues], output: OutputKind = "logps", *, entropy: bool = False
) -> dict[str, Tensor]:
    """Return what the Trainer computed as tensors: (B, L), logits (B, L, V), hidden states of last tokens (B, H)."""
    arrays = [value.output for value in values if value.output is not None]
    if output == "embeddings":
        return {"hidden": torch.from_numpy(np.concatenate(arrays))}
    leaves = {"logps": batch.padded([value.logprobs for value in values])}
    if entropy:
        leaves["entropies"] = batch.padded([value.entropies for value in values])
    if output == "logits":
        leaves["logits"] = batch.padded(arrays)
    return leaves


def finished(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs that losses and callers read: an embedding is a hidden state of length 1."""
    if "hidden" in leaves:
        return {"embeddings": torch.nn.functional.normalize(leaves["hidden"], dim=-1)}
    return dict(leaves)


def _slopes(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the derivative of the loss with respect to each leaf; 0 if it does not depend on one."""
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if slope is None else slope for (name, leaf), slope in pairs}


def outputs_of(
    batch: SequenceBatch,
    values: Sequence[TokenValues],
    output: OutputKind = "logps",
    *,
    entropy: bool = False,
    predictions: bool = False,
) -> dict[str, Tensor]:
    """Return the outputs of a forward pass for losses, metrics and callers."""
    outputs = finished(leaves_of(batch, values, output, entropy=entropy))
    if predictions and output != "embeddings":
        ids = [torch.from_numpy(value.predictions) for value in values]
        outputs["predictions"] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return outputs
