"""The similarity of anchors to their positives and to the other documents of their batch.

Groups are those of :mod:`twinkle.loss.contrastive`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from twinkle.loss.alignment import labels_of
from twinkle.loss.contrastive import embeddings_of, groups_of
from twinkle.metric.interface import Inputs, Metric, Outputs
from twinkle.metric.training import loss_texts

__all__ = ["EmbeddingMetric"]


@dataclass(frozen=True)
class _Seen:
    positives: tuple[float, ...]
    negative_sum: float
    negative_count: int
    loss: float
    calls: int
    grad_norm: float


class EmbeddingMetric(Metric):
    """Similarities, loss and gradient norm of embedding training.

    "pos_sim", "pos_sim_min" and "pos_sim_max" are the mean, lowest and highest similarity of an anchor to its positive;
    "neg_sim" is the mean similarity of an anchor to the other documents of its batch; "loss" is the mean over calls;
    "grad_norm" is the last one given (with several processes, the largest of these), left out if it is 0.
    """

    call_arguments: ClassVar[tuple[str, ...]] = ("grad_norm",)

    def reset(self) -> None:
        self._positives: list[float] = []
        self._negative_sum = 0.0
        self._negative_count = 0
        self._loss = 0.0
        self._calls = 0
        self._grad_norm = 0.0

    def accumulate(
        self, inputs: Inputs, outputs: Outputs, *, grad_norm: float | Tensor | None = None, **_: Any
    ) -> None:
        if grad_norm is not None:
            self._grad_norm = float(grad_norm)
        if outputs.get("loss") is not None:
            self._loss += float(outputs["loss"])
            self._calls += 1
        if outputs.get("embeddings") is None:
            return
        embeddings = embeddings_of({"embeddings": torch.as_tensor(outputs["embeddings"]).detach()})
        groups = groups_of(labels_of(inputs))
        if len(groups.anchors) == 0:
            return
        similarity = embeddings[groups.anchors] @ embeddings[groups.documents].T
        positives = similarity.gather(1, groups.positive[:, None])
        self._positives += positives[:, 0].tolist()
        self._negative_sum += float(similarity.sum() - positives.sum())
        self._negative_count += similarity.numel() - len(positives)

    def calculate(self) -> dict[str, str]:
        local = _Seen(
            tuple(self._positives), self._negative_sum, self._negative_count, self._loss, self._calls, self._grad_norm
        )
        parts = self.gather_results([local])
        self.reset()
        result: dict[str, str] = {}
        positives = [value for part in parts for value in part.positives]
        if positives:
            result["pos_sim"] = f"{sum(positives) / len(positives):.4f}"
            result["pos_sim_min"] = f"{min(positives):.4f}"
            result["pos_sim_max"] = f"{max(positives):.4f}"
        negatives = sum(part.negative_count for part in parts)
        if negatives > 0:
            result["neg_sim"] = f"{sum(part.negative_sum for part in parts) / negatives:.4f}"
        calls = sum(part.calls for part in parts)
        return result | loss_texts(sum(part.loss for part in parts), calls, max(part.grad_norm for part in parts))
