"""The verbs' state of one adapter as bytes: stored in snapshots and restored after a restart.

Set-up (optimizer, loss, template …) is stored as the verb calls that made it, and restored by calling them again. Then
come the counters, the settings of optimizer and scheduler, and the state of the metrics. A forward pass whose loss is
known is included in the stored metrics (counted into copies of them). One that still waits for its loss or its backward
pass cannot be stored, so no snapshot is taken meanwhile (:func:`is_settled`).
"""

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from twinkle.errors import CheckpointError
from twinkle.metric import Metric
from twinkle.metric.policy import HighKLRecord, PolicySums
from twinkle.model.library.optimizer_group import OptimizerGroup, TrainStatus, accumulate_metrics
from twinkle.model.library.training_state import plain_scheduler_state

Call = tuple[str, Mapping[str, object]]  # the name of a set-up verb, and its arguments

_PROCESS_ATTRIBUTES = ("device_mesh", "process_group", "_clock")
# Classes that metrics store beside plain values; torch refuses to read any others.
_METRIC_TYPES: list[Any] = [HighKLRecord, PolicySums]
_COUNTERS = ("cur_step", "gradient_accumulation_steps", "normalized", "last_grad_norm")


class SetUp:
    """The set-up calls of a group, in order, without those that a later call replaced."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def record(self, verb: str, arguments: Mapping[str, object]) -> None:
        """Record a call. ``set_optimizer`` also removes the scheduler, which belongs to the old optimizer."""
        replaced = {verb} if verb != "add_metric" else set()
        if verb == "set_optimizer":
            replaced.add("set_lr_scheduler")
        self.calls = [call for call in self.calls if call[0] not in replaced]
        self.calls.append((verb, arguments))


def is_settled(group: OptimizerGroup) -> bool:
    """Return whether the last forward pass waits neither for its loss nor, in training, for its backward pass."""
    status = group.status
    if status.outputs is None:
        return True
    return "loss" in status.outputs and (status.loss_value is None or not group.training)


def dump(group: OptimizerGroup, set_up: SetUp) -> bytes:
    """Return the state of a group as bytes."""
    state = {
        "config": dict(group.adapter_config or {}),
        "calls": [[verb, dict(arguments)] for verb, arguments in set_up.calls],
        "counters": {name: vars(group)[name] for name in _COUNTERS},
        "num_tokens": group.train_status.num_tokens,
        "last_lr": list(group.last_lr),
        "optimizer": None if group.optimizer is None else group.optimizer.state_dict()["param_groups"],
        "scheduler": None if group.lr_scheduler is None else plain_scheduler_state(group),
        "metrics": [_metrics(group, status) for status in (group.train_status, group.eval_status)],
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read(state: bytes) -> dict[str, Any]:
    """Return the state from bytes made by :func:`dump`."""
    try:
        with torch.serialization.safe_globals(_METRIC_TYPES):
            values: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"the saved state of an adapter's verbs cannot be read: {error}") from error
    return values


def restore(group: OptimizerGroup, state: Mapping[str, Any]) -> None:
    """Restore counters, settings and metrics of a group that has been set up by the stored calls."""
    for name in _COUNTERS:
        setattr(group, name, state["counters"][name])
    group.train_status.num_tokens = state["num_tokens"]
    group.last_lr = tuple(state["last_lr"])
    if group.optimizer is not None:
        group.optimizer.load_state_dict({"state": {}, "param_groups": state["optimizer"]})
    if group.lr_scheduler is not None:
        group.lr_scheduler.load_state_dict(state["scheduler"])
    for status, metrics in zip((group.train_status, group.eval_status), state["metrics"], strict=True):
        for metric, seen in zip(status.metrics, metrics, strict=True):
            vars(metric).update(seen)


def _metrics(group: OptimizerGroup, status: TrainStatus) -> list[dict[str, Any]]:
    """Return the state of the metrics, including the last pass.

    The pass is counted into copies of the metrics, since the group itself will count it later.
    """
    ahead = copy.copy(status)
    ahead.metrics = [copy.deepcopy(metric) for metric in status.metrics]
    accumulate_metrics(group, ahead)
    return [_seen(metric) for metric in ahead.metrics]


def _seen(metric: Metric) -> dict[str, Any]:
    return {name: value for name, value in vars(metric).items() if name not in _PROCESS_ATTRIBUTES}
