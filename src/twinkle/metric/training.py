"""Metrics of any training: loss, accuracy, learning rate and speed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.loss.alignment import labels_of
from twinkle.loss.interface import IGNORE_INDEX
from twinkle.metric.interface import Inputs, Metric, Outputs

__all__ = ["Accuracy", "LossMetric", "TrainMetric"]


@dataclass(frozen=True)
class _LossSums:
    loss: float  # Σ of the losses, sums or means
    count: float  # tokens of the sums, or calls
    grad_norm: float


class LossMetric(Metric):
    """Reports "loss", and "grad_norm" if it is above 0.

    With ``loss_reduction`` "sum", the loss is Σ losses / Σ tokens, where tokens are counted by outputs["num_tokens"]
    or, where that is missing or 0, by labels of 0 or more. Otherwise it is the mean over calls. The norm is the last
    one given; with several processes, the largest of these.
    """

    call_arguments: ClassVar[tuple[str, ...]] = ("grad_norm", "loss_reduction")

    def reset(self) -> None:
        self.total_loss = 0.0
        self.total_count = 0.0
        self.grad_norm = 0.0

    def accumulate(
        self,
        inputs: Inputs,
        outputs: Outputs,
        *,
        loss_reduction: str = "mean",
        grad_norm: float | Tensor | None = None,
        **_: Any,
    ) -> None:
        if grad_norm is not None:
            self.grad_norm = float(grad_norm)
        if outputs.get("loss") is None:
            return
        self.total_loss += float(outputs["loss"])
        self.total_count += _token_count(inputs, outputs) if loss_reduction == "sum" else 1.0

    def calculate(self) -> dict[str, str]:
        parts = self.gather_results([_LossSums(self.total_loss, self.total_count, self.grad_norm)])
        self.reset()
        return loss_texts(
            sum(part.loss for part in parts), sum(part.count for part in parts), max(part.grad_norm for part in parts)
        )


def loss_texts(total: float, count: float, grad_norm: float) -> dict[str, str]:
    result = {"loss": f"{total / count:.4f}"} if count > 0 else {}
    return result | ({"grad_norm": f"{grad_norm:.6f}"} if grad_norm > 0 else {})


class Accuracy(Metric):
    """Counts labels that have the highest logit: "accuracy", "correct_tokens" and "total_tokens".

    Reads outputs["predictions"], the index of the highest logit at each position, or else outputs["logits"]. Without
    either, or without tokens, nothing is reported. Tokens with a label count; if the inputs have a ``completion_mask``,
    only those of them that are in the mask.
    """

    def reset(self) -> None:
        self.total_correct = 0
        self.total_count = 0

    def accumulate(self, inputs: Inputs, outputs: Outputs, **_: Any) -> None:
        if not isinstance(inputs, Mapping):
            raise InvalidInputError("inputs", f"a {type(inputs).__name__}", "a padded batch")
        predictions = outputs.get("predictions")
        if predictions is None and outputs.get("logits") is not None:
            predictions = torch.as_tensor(outputs["logits"]).argmax(-1)
        if predictions is None:
            return
        labels = labels_of(inputs)
        mask = labels != IGNORE_INDEX
        if inputs.get("completion_mask") is not None:
            mask = mask & torch.as_tensor(inputs["completion_mask"], device=labels.device).bool()
        correct = torch.as_tensor(predictions).to(labels.device) == labels
        self.total_correct += int((correct & mask).sum())
        self.total_count += int(mask.sum())

    def calculate(self) -> dict[str, Any]:
        parts = self.gather_results([(self.total_correct, self.total_count)])
        self.reset()
        correct, count = (sum(column) for column in zip(*parts, strict=True))
        if count == 0:
            return {}
        return {"accuracy": f"{correct / count:.2f}", "correct_tokens": correct, "total_tokens": count}


class TrainMetric(Metric):
    """Reports "learning rate", "iters", "total time elapse" and "speed".

    "iters" is the number of optimizer steps before this one. The time counts from the creation of the metric, the speed
    from the last report. If parameter groups have different learning rates, each has its own key.
    """

    call_arguments: ClassVar[tuple[str, ...]] = ("gradient_accumulation_steps", "lr", "step")

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._start = clock()
        self._reported_at = self._start
        self._reported_step = 0
        self._iters = 0
        self._seen = False
        self._rates: tuple[float, ...] = ()
        super().__init__(device_mesh, process_group)

    def reset(self) -> None:
        """Restart the measurement of speed. Total time and steps continue."""
        self._reported_at = self._clock()
        self._reported_step = self._iters

    def accumulate(
        self,
        inputs: Inputs,
        outputs: Outputs,
        *,
        lr: float | Sequence[float] = (),
        step: int = 0,
        gradient_accumulation_steps: int = 1,
        **_: Any,
    ) -> None:
        self._rates = tuple(float(rate) for rate in (lr if isinstance(lr, Sequence) else (lr,)))
        self._iters = step // gradient_accumulation_steps
        if not self._seen:  # a resumed run does not start at step 0
            self._reported_step = max(self._iters - 1, 0)
            self._seen = True

    def calculate(self) -> dict[str, Any]:
        now = self._clock()
        elapsed, window = now - self._start, now - self._reported_at
        result: dict[str, Any] = {**self._rate_texts(), "iters": self._iters}
        result["total time elapse"] = f"{elapsed:.0f} seconds" if elapsed < 60 else f"{elapsed / 60:.1f} minutes"
        if window > 0:
            result["speed"] = f"{(self._iters - self._reported_step) / window:.2f} iters/s"
        self.reset()
        return result

    def _rate_texts(self) -> dict[str, str]:
        if len(set(self._rates)) == 1:
            return {"learning rate": f"{self._rates[0]:.6e}"}
        return {f"learning rate(param group {i})": f"{rate:.6e}" for i, rate in enumerate(self._rates, start=1)}


def _token_count(inputs: Inputs, outputs: Outputs) -> float:
    counted = outputs.get("num_tokens")
    if counted is not None and float(counted) > 0:
        return float(counted)
    return float((labels_of(inputs) >= 0).sum())
