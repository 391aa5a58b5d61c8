"""Schedules with a warm-up, compared with their formula."""

import math

import pytest
import torch

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.module.scheduler import CosineWarmupScheduler, LinearWarmupScheduler, scheduler_by_name


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.02)]
    return torch.optim.SGD(groups)


def rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[list[float]]:
    result = []
    for _ in range(steps):
        result.append(scheduler.get_last_lr())
        scheduler.optimizer.step()
        scheduler.step()
    return result


@pytest.mark.parametrize("cycles", [0.5, 1.5])
@pytest.mark.parametrize("warmup", [0, 4])
def test_cosine(warmup: int, cycles: float) -> None:
    scheduler = CosineWarmupScheduler(optimizer(), warmup, 20, num_cycles=cycles)
    for step, (first, second) in enumerate(rates(scheduler, 25)):
        if step < warmup:
            factor = step / warmup
        elif step > 20:
            factor = 0.0
        else:
            factor = 0.5 * (1 + math.cos(2 * math.pi * cycles * (step - warmup) / (20 - warmup)))
        assert first == pytest.approx(0.1 * factor)
        assert second == pytest.approx(0.02 * factor)


@pytest.mark.parametrize("warmup", [0, 4])
def test_linear(warmup: int) -> None:
    scheduler = LinearWarmupScheduler(optimizer(), warmup, 20)
    for step, (first, _) in enumerate(rates(scheduler, 25)):
        factor = step / warmup if step < warmup else max(0.0, (20 - step) / (20 - warmup))
        assert first == pytest.approx(0.1 * factor)


def test_all_warm_up() -> None:
    for make in (CosineWarmupScheduler, LinearWarmupScheduler):
        values = [first for first, _ in rates(make(optimizer(), 3, 3), 5)]
        assert values[:3] == pytest.approx([0.0, 0.1 / 3, 0.2 / 3])
        assert values[4] == 0


@pytest.mark.parametrize("make", [CosineWarmupScheduler, LinearWarmupScheduler])
def test_continues_from_its_state(make, tmp_path) -> None:
    whole = rates(make(optimizer(), 3, 12), 12)
    first = make(optimizer(), 3, 12)
    rates(first, 5)
    torch.save({"optimizer": first.optimizer.state_dict(), "scheduler": first.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    second = make(optimizer(), 3, 12)
    second.optimizer.load_state_dict(state["optimizer"])
    second.load_state_dict(state["scheduler"])
    assert rates(second, 7) == whole[5:]


def test_steps_that_make_no_sense() -> None:
    with pytest.raises(InvalidInputError, match="num_warmup_steps: got -1"):
        CosineWarmupScheduler(optimizer(), -1, 10)
    with pytest.raises(InvalidInputError, match="num_training_steps: got -3"):
        LinearWarmupScheduler(optimizer(), 4, -3)


@pytest.mark.parametrize("make", [CosineWarmupScheduler, LinearWarmupScheduler])
def test_a_warm_up_longer_than_the_training_never_reaches_the_peak(make) -> None:
    values = [first for first, _ in rates(make(optimizer(), 8, 4), 4)]
    assert values == pytest.approx([0.1 * step / 8 for step in range(4)])


def test_names() -> None:
    assert scheduler_by_name("CosineWarmupScheduler") is CosineWarmupScheduler
    assert scheduler_by_name("LinearLR") is torch.optim.lr_scheduler.LinearLR
    for name in ("cosine", "LRScheduler", "Optimizer"):
        with pytest.raises(UnknownNameError, match=rf"'{name}'; known: .*CosineWarmupScheduler, .*, StepLR"):
            scheduler_by_name(name)
