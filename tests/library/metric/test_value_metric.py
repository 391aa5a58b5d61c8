"""Metrics of a critic, compared with numpy on all tokens at once."""

import math
import sys

import numpy as np
import pytest
import torch

from tests.library.metric.test_metrics import ADVANTAGES, INPUTS, NEW, OLD
from tests.support.losses.batches import batch, poisoned
from tests.support.losses.device_tensor import DeviceTensor
from twinkle.errors import InvalidInputError
from twinkle.metric import GRPOMetric, PPOMetric, PPOValueMetric

SIZES = (1, 3)


def critic_batch(seed: int):
    b = batch(seed)
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(b.logps.shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return b, poisoned(values, b.mask), values + 0.2 * old, 100 + returns  # far from 0: squares would cancel out


def expected(batches, epsilon=0.2):
    columns = [np.concatenate([each[i][each[0].mask].numpy() for each in batches]) for i in (1, 2, 3)]
    values, old, returns = columns
    advantages = returns - old
    return {
        "train/value_mean": values.mean(),
        "train/return_mean": returns.mean(),
        "train/value_clip_ratio": (np.abs(values - old) > epsilon).mean(),
        "train/explained_variance": 1 - np.var(returns - values) / np.var(returns),
        "train/advantage_mean": advantages.mean(),
        "train/advantage_std": advantages.std(),
    }


def cut(table: torch.Tensor) -> list[torch.Tensor]:
    return list(table.split(SIZES))


@pytest.mark.parametrize("form", ["one batch", "micro-batches", "values of each", "outputs of each", "features"])
def test_formula(form: str) -> None:
    metric, batches = PPOValueMetric(), [critic_batch(seed) for seed in range(3)]
    for b, values, old, returns in batches:
        inputs, outputs = b.inputs, {"values": values}
        if form == "features":
            inputs, outputs = [{"labels": row.tolist()} for row in b.labels], {"values": values[..., None]}
        elif form != "one batch":
            inputs = [{"labels": part} for part in cut(b.labels)]
        if form == "values of each":
            outputs = {"values": cut(values)}
        if form == "outputs of each":
            outputs = [{"values": part} for part in cut(values)]
        given = {"old_values": b.rows(old), "returns": b.rows(returns), "advantages": returns - old}
        metric.accumulate(inputs, outputs, **given, lr=[0.1], step=1)
    assert metric.calculate() == pytest.approx(expected(batches), rel=1e-9)
    assert metric.calculate() == {}


def test_nothing_to_say() -> None:
    metric, (b, values, old, returns) = PPOValueMetric(), critic_batch(0)
    metric.accumulate(b.inputs, None, old_values=old, returns=returns)
    metric.accumulate(b.inputs, {}, old_values=old, returns=returns)
    metric.accumulate(b.inputs, {"values": values}, returns=returns)
    metric.accumulate(b.inputs, {"values": values}, old_values=old)
    assert metric.calculate() == {}
    metric.accumulate(b.inputs, {"values": values}, old_values=old, returns=returns)
    assert metric.calculate().keys() == {name for name in expected([critic_batch(0)]) if "advantage" not in name}
    with pytest.raises(InvalidInputError, match="values of 3 sequences"):
        metric.accumulate(b.inputs, {"values": values[1:]}, old_values=old, returns=returns)
    constant = torch.ones(b.labels.shape)
    metric.accumulate(b.inputs, {"values": constant}, old_values=constant, returns=constant)
    assert metric.calculate()["train/explained_variance"] == 1.0  # no variance to explain, and no error


def test_numbers_for_other_sequences_are_refused() -> None:
    b, values, old, returns = critic_batch(0)
    metric, given = PPOValueMetric(), {"old_values": old, "returns": returns, "advantages": returns - old}
    for name, table in given.items():
        with pytest.raises(InvalidInputError, match=f"{name}: got '?5 entries'?, allowed: one for each of the 4"):
            metric.accumulate(b.inputs, {"values": values}, **{**given, name: torch.cat([table, table[:1]])})
    with pytest.raises(InvalidInputError, match=r"outputs: got '?values of shape"):
        metric.accumulate(b.inputs, {"values": values[:, :1]}, **given)
    assert metric.calculate() == {}


def test_memory_does_not_grow_with_tokens() -> None:
    """Only moments are stored, whatever the number of tokens."""

    def size(steps: int) -> int:
        metric, (b, values, old, returns) = PPOValueMetric(), critic_batch(0)
        for _ in range(steps):
            metric.accumulate(b.inputs, {"values": values}, old_values=old, returns=returns)
        return sum(sys.getsizeof(number) for part in vars(metric.moments).values() for number in vars(part).values())

    assert size(1) == size(50)


@pytest.mark.parametrize("form", ["tables", "rows"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gpu_is_waited_for_a_few_times_whatever_the_number_of_rows(form: str, micro_batches: int) -> None:
    b, values, old, returns = critic_batch(0)

    def on_device(table: torch.Tensor) -> DeviceTensor | list[DeviceTensor]:
        return DeviceTensor(table) if form == "tables" else [DeviceTensor(torch.tensor(row)) for row in b.rows(table)]

    def accumulate(metric: PPOValueMetric | PPOMetric, **given: torch.Tensor) -> dict[str, float]:
        name = "values" if isinstance(metric, PPOValueMetric) else "logps"
        inputs, outputs = {"labels": DeviceTensor(b.labels)}, {name: DeviceTensor(values)}
        if micro_batches > 1 and name == "values":
            inputs = [{"labels": DeviceTensor(part)} for part in cut(b.labels)]
        DeviceTensor.waits = 0
        metric.accumulate(inputs, outputs, **{key: on_device(table) for key, table in given.items()})
        assert 0 < DeviceTensor.waits <= 5  # labels, values, and each of the three keywords
        return metric.calculate()

    found = accumulate(PPOValueMetric(), old_values=old, returns=returns, advantages=returns - old)
    assert found == pytest.approx(expected([critic_batch(0)]), rel=1e-6)  # rows are fp32 here
    mean = values[b.mask].mean().item()
    assert accumulate(PPOMetric(), old_logps=old, advantages=returns)["train/mean_new_logp"] == pytest.approx(mean)


def test_parts_of_several_processes_are_combined() -> None:
    first, second = PPOValueMetric(), PPOValueMetric()
    batches = [critic_batch(0), critic_batch(5)]
    for metric, (b, values, old, returns) in zip((first, second), batches, strict=True):
        metric.accumulate(b.inputs, {"values": values}, old_values=old, returns=returns, advantages=returns - old)
    first.gather_results = lambda local: [*local, second.moments]
    assert first.calculate() == pytest.approx(expected(batches), rel=1e-9)


def test_the_policys_metric_is_grpos() -> None:
    ours, theirs = PPOMetric(epsilon=0.3), GRPOMetric(epsilon=0.3)
    for metric in (ours, theirs):
        metric.accumulate(INPUTS, {"logps": NEW}, old_logps=OLD, advantages=ADVANTAGES)
    found = ours.calculate()
    assert found == theirs.calculate()
    assert math.isfinite(found["train/approx_kl"])
