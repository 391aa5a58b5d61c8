"""Whose mistake a failed verb is: the tenant's if its own choice failed, otherwise the server's, which is logged."""

import json
import logging
import pickle
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from twinkle.model.library.optimizer_group import OptimizerGroup
from twinkle.model.multi_lora.library_objective import LibraryObjective
from twinkle.model.multi_lora.requests import LoraRequests
from twinkle.model.multi_lora.verbs import LoraVerbs
from twinkle.model.types import LoraSpec
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.mock import mock_model
from twinkle.server.backends.mock.trainer import MockTrainer
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.execution import Execution
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.services.training.run_kind import RunKinds
from twinkle.server.telemetry.recording import TrainingRecorder
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import CreateNative, NativePass, NativeVerb, Op, OpKind, Outcome
from twinkle.server.verbs.codec import SentVerb
from twinkle.server.verbs.runs import NativeRuns

ROWS = ({"input_ids": np.arange(1, 5), "labels": np.array([-100, 3, 4, 5])},)
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def runs_of(model: ServedModel) -> NativeRuns:
    return NativeRuns(model, None, Tenants())  # type: ignore[arg-type]  # nothing is stored here


class Ops:
    """Runs verbs on an adapter of the mock, as the compute thread does."""

    def __init__(self) -> None:
        model = mock_model()
        context = SimpleNamespace(
            model=model,
            kinds=RunKinds([runs_of(model)]),
            measurements=RunMeasurements(None),  # type: ignore[arg-type]  # nothing is written here
            recorder=TrainingRecorder("mock"),
        )
        self._execution = Execution(cast("TrainingContext", context))
        self._seq = 0
        create = Op("r", 0, OpKind.CREATE, CreateNative(LoraSpec(4), CONFIG, 1), b"")
        assert not self._execution.short_barriers([create])[0].failed
        self.done("set_optimizer", optimizer_cls="AdamW", lr=0.05)

    def run(self, verb: str, /, **fields: Any) -> Outcome:
        self._seq += 1
        op = SentVerb(verb, {"adapter_name": "a", **fields}, b"", b"", b"").op("r", self._seq)
        run = self._execution.passes if op.kind.is_pass else self._execution.short_barriers
        return run([op])[0]

    def done(self, verb: str, **fields: Any) -> None:
        outcome = self.run(verb, **fields)
        assert not outcome.failed, outcome.body

    def failure(self, verb: str, /, **fields: Any) -> tuple[str, str]:
        """Return (category of the mistake, message to the client)."""
        outcome = self.run(verb, **fields)
        assert outcome.failed
        told = json.loads(outcome.body)
        return told["category"], told["error"]


@pytest.fixture
def ops() -> Ops:
    return Ops()


@pytest.mark.parametrize("error", [KeyError("ours"), TypeError("ours"), AttributeError("ours"), ValueError("ours")])
@pytest.mark.parametrize(
    ("holder", "method", "verb", "fields"),
    [
        (LoraRequests, "forward_item", "forward", {"inputs": ROWS}),
        (LoraRequests, "train_request", "forward_backward", {"inputs": ROWS}),
        (LoraRequests, "outputs", "forward_backward", {"inputs": ROWS}),
        (LoraVerbs, "_normalize", "clip_grad_and_step", {}),
        (OptimizerGroup, "required_optimizer", "step", {}),
        (OptimizerGroup, "set_accumulation", "lr_step", {}),
        (LoraVerbs, "get_peft_config_dict", "get_train_configs", {}),
    ],
)
def test_a_bug_of_ours_is_ours(
    ops: Ops,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    holder: type,
    method: str,
    verb: str,
    fields: dict[str, Any],
    error: Exception,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(holder, method, broken)
    with caplog.at_level(logging.ERROR):
        category, message = ops.failure(verb, **fields)
    assert category == "server"
    assert "the server's log" in message
    assert "ours" not in message  # the tenant learns nothing about the server's internals
    assert any(record.exc_info is not None and record.exc_info[1] is error for record in caplog.records)


def test_a_large_state_dict_is_refused_before_it_is_copied(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*_: object) -> None:
        raise AssertionError("the weights of a large model must not be copied for this")

    monkeypatch.setattr(MockTrainer, "shapes", lambda *_: {"w": (2**10, 2**10), "b": (1,)})
    monkeypatch.setattr(MockTrainer, "weights", copied)
    category, message = ops.failure("get_state_dict")
    assert category == "user"
    assert message.startswith("get_state_dict: got '1048577 numbers', allowed: at most 1048576 as JSON")


def test_a_schedule_that_has_ended(ops: Ops, caplog: pytest.LogCaptureFixture) -> None:
    ops.done("set_lr_scheduler", scheduler_cls="OneCycleLR", max_lr=0.1, total_steps=1)
    ops.done("lr_step")
    for verb in ("lr_step", "clip_grad_and_step"):
        category, message = ops.failure(verb)
        assert (category, "total steps" in message) == ("user", True)
    assert not caplog.records


@pytest.mark.parametrize("verb", ["forward_backward", "calculate_metric"])
def test_a_metric_with_a_bad_argument(ops: Ops, verb: str) -> None:
    ops.done("add_metric", metric_cls="GRPOMetric", is_training=True, ignore_index="x")
    ops.done("forward_backward", inputs=ROWS)
    fields = {"inputs": ROWS} if verb == "forward_backward" else {"is_training": True}
    category, message = ops.failure(verb, **fields)
    assert (category, message.startswith("GRPOMetric: ")) == ("user", True)


def test_a_loss_with_bad_arguments(ops: Ops) -> None:
    ops.done("set_loss", loss_cls="GRPOLoss")
    for advantages in ([1.0, 2.0, 3.0, 4.0, 5.0], "x", {"a": 1}):
        category, message = ops.failure("forward_backward", inputs=ROWS, advantages=advantages)
        assert category == "user", message
    ops.done("forward", inputs=ROWS, advantages=[1.0, 2.0, 3.0, 4.0, 5.0])
    assert ops.failure("calculate_loss")[0] == "user"


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("set_lr_scheduler", {"scheduler_cls": "CyclicLR", "base_lr": 5.0, "max_lr": 6.0, "scale_fn": "x"}),
        ("set_lr_scheduler", {"scheduler_cls": "StepLR", "step_size": "x"}),
        ("set_optimizer", {"optimizer_cls": "AdamW", "betas": 5}),
        ("add_metric", {"metric_cls": "Accuracy", "no_such_option": 1}),
        ("set_processor", {"processor_cls": "InputProcessor", "padding_side": "up"}),
        ("calculate_loss", {"self": 1}),
        ("forward_backward", {"inputs": ROWS, "self": 1}),
    ],
)
def test_what_a_tenant_chose_cannot_be_made(ops: Ops, verb: str, fields: dict[str, Any]) -> None:
    if ops.run(verb, **fields).failed:
        assert ops.failure(verb, **fields)[0] == "user"
    else:  # a scheduler reads some options only when it steps
        assert ops.failure("lr_step")[0] == "user"


def test_a_loss_goes_to_other_processes_as_it_is() -> None:
    """If several processes share a batch, they send back the objective, which has counted the tokens."""
    model = mock_model()
    native = runs_of(model).adapters
    native.add("r", CONFIG)
    native.run("r", NativeVerb("set_loss", {"loss_cls": "GRPOLoss"}))
    prepared = native.prepare("r", NativePass("forward_backward", ROWS, {}, {"advantages": [1.0]}))
    objective = pickle.loads(pickle.dumps(prepared.item.objective))
    assert isinstance(objective, LibraryObjective)
