"""What the library's verbs tell of a run's steps. Inside a window of accumulated gradients they do nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinkle.model.types import TrainItem
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.types import Op

if TYPE_CHECKING:  # it needs torch
    from twinkle.model.optimizer_group import OptimizerGroup


def measure_pass(measurements: RunMeasurements, item: TrainItem, outputs: Mapping[str, Any]) -> None:
    """A backward pass; a loss without a number of tokens is a mean already, and counts once."""
    if outputs.get("loss") is not None:
        count, tokens = float(outputs.get("num_tokens") or 0.0), sum(len(datum.tokens) for datum in item.data)
        measurements.passed(item.adapter_id, float(outputs["loss"]), count if count > 0 else 1.0, tokens)


def measure_verb(measurements: RunMeasurements, op: Op, verb: str, group: "OptimizerGroup") -> None:
    if not group.at_boundary:
        return
    if verb in ("clip_grad_norm", "clip_grad_and_step"):
        measurements.clipped(op.adapter_id, group.last_grad_norm)
    if verb in ("step", "clip_grad_and_step"):
        measurements.stepped(op.adapter_id, op.seq, group.last_lr[0] if group.last_lr else None)
    if verb == "zero_grad":
        measurements.dropped(op.adapter_id)
