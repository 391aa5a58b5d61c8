"""When a run has left, weights, optimizer state, gradient, counts and results are those of a fresh trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.full.plain_run import RUN, full_trainer, request, the_result, train, with_run
from tests.support.models.reference import assert_tensors_close, toy_llama
from tests.support.models.tiny_models import tiny_model
from twinkle.model import AdamParams, FullSpec, FullTrainer

BASE = toy_llama(tie_word_embeddings=True)
ADAM = AdamParams(learning_rate=0.02, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)


def history(trainer: FullTrainer) -> list[Any]:
    """Return what a new run of two steps gives: losses, norms, weights, snapshot."""
    trainer.create_adapter(RUN, FullSpec())
    found: list[Any] = [trainer.step_count(RUN), trainer.gradients(RUN), trainer.gradient_norm(RUN)]
    for seed in range(2):
        result = the_result(trainer.forward_backward([request(BASE, seed)]))
        found += [result.metrics, result.logprobs, trainer.optim_step(RUN, ADAM)]
    snapshot = trainer.snapshot(RUN)
    found += [snapshot.step, snapshot.passes, snapshot.optimizer, snapshot.scalars]
    return [*found, snapshot.weights, snapshot.exp_avg, snapshot.exp_avg_sq]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_equal(left, right)


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("trained", torch.float32),
        ("trained", torch.bfloat16),
        ("loaded", torch.float32),
        ("restored", torch.bfloat16),
        ("in the middle", torch.float32),
    ],
)
def test_the_next_run_is_that_of_a_fresh_trainer(how: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A run leaves after steps of another optimizer, a load, a restored snapshot, or with a gradient."""
    fresh, used = full_trainer(BASE, dtype=dtype), with_run(BASE, dtype=dtype)
    scored = the_result(fresh.forward([request(BASE, 9, base_model=True)]))
    used.forward_backward([request(BASE, 7)])
    used.optimizer_step(RUN, "NAdam", {"lr": 0.05})
    if how == "loaded":
        used.save(RUN, tmp_path / "x")
        used.load(RUN, tmp_path / "x")
    if how == "restored":
        used.restore(RUN, used.snapshot(RUN))
    if how == "in the middle":
        used.forward_backward([request(BASE, 8)])
        steps = used.in_steps([request(BASE, 6, 9, 14, 6)], train=True, limit=lambda: 10)
        next(steps)
        steps.close()
    used.remove_adapter(RUN)
    assert used.adapter_ids() == []
    assert used.host_bytes() == 0
    again = the_result(used.forward([request(BASE, 9, base_model=True)]))
    assert_same([again.logprobs, again.metrics], [scored.logprobs, scored.metrics])
    assert_same(history(used), history(fresh))


def test_weights_that_bf16_does_not_hold_come_back_exactly() -> None:
    """The base is kept as bf16 only where that loses nothing."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if number % 2:
                parameter.copy_(parameter.bfloat16())
    trainer = with_run(model)
    fresh = trainer.weights(RUN)
    sizes = [parameter.numel() * (2 if number % 2 else 4) for number, parameter in enumerate(model.parameters())]
    assert trainer.memory.state.base == sum(sizes)
    train(trainer, request(model, 1), ADAM)
    assert any(not np.array_equal(fresh[name], each) for name, each in trainer.weights(RUN).items())
    trainer.remove_adapter(RUN)
    trainer.create_adapter(RUN, FullSpec())
    assert_tensors_close(trainer.weights(RUN), fresh, 0.0)


def test_a_snapshot_continues_exactly_with_its_open_window() -> None:
    trainer = with_run(BASE)
    train(trainer, request(BASE, 1), ADAM)
    trainer.forward_backward([request(BASE, 2)])
    snapshot = trainer.snapshot(RUN)

    def go_on(trainer: FullTrainer) -> list[Any]:
        result = the_result(trainer.forward_backward([request(BASE, 3)]))
        stepped = trainer.optim_step(RUN, ADAM)
        later = trainer.snapshot(RUN)
        return [result.metrics, stepped, later.weights, later.exp_avg, later.exp_avg_sq, later.step, later.passes]

    expected = go_on(trainer)
    other = full_trainer(BASE)
    other.restore(RUN, snapshot)
    assert_same(go_on(other), expected)
    trainer.restore(RUN, snapshot)
    assert_same(go_on(trainer), expected)
