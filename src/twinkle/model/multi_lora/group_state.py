"""What the library's verbs know of an adapter, as bytes: it goes into snapshots and comes back after a restart.

Set-up is kept as the calls that made it, and made again by them; then come the counters, the settings of optimizer and
schedule, and what the metrics have seen. A pass that has its loss is counted into copies of the metrics. One that still
waits for its backward pass cannot be kept: no snapshot is taken meanwhile.
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

Call = tuple[str, Mapping[str, object]]  # a verb that set something up, and its arguments

_PROCESS_ATTRIBUTES = ("device_mesh", "process_group", "_clock")
# What metrics keep beside plain values: torch reads no other classes from a file.
_METRIC_TYPES: list[Any] = [HighKLRecord, PolicySums]
_COUNTERS = ("cur_step", "gradient_accumulation_steps", "normalized", "last_grad_norm")


class SetUp:
    """The calls that brought a group to its settings, in order; what a later call replaced is forgotten."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def note(self, verb: str, arguments: Mapping[str, object]) -> None:
        replaced = {verb} if verb != "add_metric" else set()
        if verb == "set_optimizer":
            replaced.add("set_lr_scheduler")
        self.calls = [call for call in self.calls if call[0] not in replaced]
        self.calls.append((verb, arguments))


def is_settled(group: OptimizerGroup) -> bool:
    """Whether the last forward pass waits neither for its loss nor, in training, for its backward pass."""
    status = group.status
    if status.outputs is None:
        return True
    return "loss" in status.outputs and (status.loss_value is None or not group.training)


def dump(group: OptimizerGroup, set_up: SetUp) -> bytes:
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
    try:
        with torch.serialization.safe_globals(_METRIC_TYPES):
            values: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"what the verbs knew of an adapter cannot be read: {error}") from error
    return values


def put_back(group: OptimizerGroup, state: Mapping[str, Any]) -> None:
    """The group has been set up by the same calls."""
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
    """What they have seen, the last pass included: on copies, for the group goes on and will count it itself."""
    ahead = copy.copy(status)
    ahead.metrics = [copy.deepcopy(metric) for metric in status.metrics]
    accumulate_metrics(group, ahead)
    return [_seen(metric) for metric in ahead.metrics]


def _seen(metric: Metric) -> dict[str, Any]:
    return {name: value for name, value in vars(metric).items() if name not in _PROCESS_ATTRIBUTES}
