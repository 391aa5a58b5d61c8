"""Metrics, compared with numbers computed by hand or by loops."""

import inspect
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing

import twinkle.metric
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.metric import (
    Accuracy,
    CISPOMetric,
    CompletionRewardMetric,
    DPOMetric,
    EmbeddingMetric,
    GRPOMetric,
    GSPOMetric,
    LossMetric,
    PPOValueMetric,
    TrainMetric,
    metric_by_name,
)
from twinkle.metric.registry import METRICS

LABELS = torch.tensor([[-100, 3, 4, 5], [6, 7, -100, -100]])
INPUTS = {"labels": LABELS}
NEW = torch.tensor([[math.nan, -1.0, -2.0, -3.0], [-0.5, -1.5, math.inf, math.nan]])
OLD = [[-1.5, -2.0, -2.9], [-0.5, -1.0]]  # one value for each label
ADVANTAGES = [-1.0, 1.0]


# --- loss -------------------------------------------------------------------------------------------------------------


def test_loss_of_sums_is_a_mean_over_all_tokens() -> None:
    metric = LossMetric()
    metric.accumulate(INPUTS, {"loss": torch.tensor(10.0), "num_tokens": torch.tensor(4)}, loss_reduction="sum")
    metric.accumulate(INPUTS, {"loss": 2.0, "num_tokens": 12}, loss_reduction="sum", grad_norm=0.25)
    assert metric.calculate() == {"loss": "0.7500", "grad_norm": "0.250000"}
    assert metric.calculate() == {}


def test_loss_of_sums_counts_labels_if_the_model_did_not() -> None:
    metric = LossMetric()
    metric.accumulate(INPUTS, {"loss": 10.0}, loss_reduction="sum")
    assert metric.calculate() == {"loss": "2.0000"}


def test_loss_of_means_is_a_mean_over_calls() -> None:
    metric = LossMetric()
    for loss, norm in ((1.0, 5.0), (2.0, torch.tensor(0.5)), (6.0, None)):
        metric.accumulate(INPUTS, {"loss": loss, "num_tokens": 0}, loss_reduction="mean", grad_norm=norm)
    metric.accumulate(INPUTS, {"logps": NEW})
    assert metric.calculate() == {"loss": "3.0000", "grad_norm": "0.500000"}


# --- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["logits", "predictions"])
def test_accuracy(form: str) -> None:
    predictions = torch.tensor([[1, 3, 4, 0], [6, 0, 9, 9]])
    values = torch.nn.functional.one_hot(predictions, 10).float() if form == "logits" else predictions
    metric = Accuracy()
    metric.accumulate(INPUTS, {form: values})
    assert (metric.total_correct, metric.total_count) == (3, 5)
    metric.accumulate(INPUTS | {"completion_mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])}, {form: values})
    assert metric.calculate() == {"accuracy": "0.67", "correct_tokens": 4, "total_tokens": 6}
    assert metric.calculate() == {}


def test_accuracy_without_logits_or_labels_says_nothing() -> None:
    metric = Accuracy()
    metric.accumulate(INPUTS, {"logps": NEW})
    metric.accumulate({"labels": torch.full((1, 3), -100)}, {"predictions": torch.zeros(1, 3)})
    assert metric.calculate() == {}
    with pytest.raises(InvalidInputError, match="inputs: got 'a list', allowed: a padded batch"):
        metric.accumulate([INPUTS], {"predictions": torch.zeros(2, 4)})


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_reports_rate_steps_time_and_speed() -> None:
    now = 100.0
    metric = TrainMetric(clock=lambda: now)
    for step in range(6):
        metric.accumulate(INPUTS, {}, lr=[1e-4, 1e-4], step=step, gradient_accumulation_steps=2)
    now = 104.0
    assert metric.calculate() == {
        "learning rate": "1.000000e-04",
        "iters": 2,
        "total time elapse": "4 seconds",
        "speed": "0.50 iters/s",
    }
    metric.accumulate(INPUTS, {}, lr=[1e-4, 2.5e-5], step=24, gradient_accumulation_steps=2)
    now = 190.0
    assert metric.calculate() == {
        "learning rate(param group 1)": "1.000000e-04",
        "learning rate(param group 2)": "2.500000e-05",
        "iters": 12,
        "total time elapse": "1.5 minutes",
        "speed": "0.12 iters/s",
    }


def test_speed_of_training_that_was_resumed() -> None:
    now = 0.0
    metric = TrainMetric(clock=lambda: now)
    for step in range(1000, 1004):
        metric.accumulate(INPUTS, {}, lr=[1e-4], step=step)
    now = 2.0
    assert metric.calculate()["speed"] == "2.00 iters/s"


# --- policies ---------------------------------------------------------------------------------------------------------


def policy_numbers() -> dict[str, float]:
    new = [-1.0, -2.0, -3.0, -0.5, -1.5]
    old = [-1.5, -2.0, -2.9, -0.5, -1.0]
    difference = [a - b for a, b in zip(new, old, strict=True)]
    kl = [math.exp(d) - d - 1 for d in difference]
    return {
        "train/policy_confidence": math.exp(sum(new) / 5),
        "train/mean_new_logp": sum(new) / 5,
        "train/mean_old_logp": sum(old) / 5,
        "train/logp_diff_mean": sum(difference) / 5,
        "train/approx_kl": sum(kl) / 5,
        "train/token_kl_max": max(kl),
        "train/token_ratio_max": math.exp(0.5),
    }


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        # ratios e^.5, 1, e^−.1 with A = −1, and 1, e^−.5 with A = 1: given the sign of A, none is clipped …
        (GRPOMetric, 0.0, 0.0),
        # … by the ratio alone, one is below and one above the bounds
        (CISPOMetric, 1 / 5, 1 / 5),
        # the sequences' ratios are e^(.4/3) with A = −1 and e^−.25 with A = 1
        (GSPOMetric, 0.0, 0.0),
    ],
)
def test_policy_metrics(make: type[GRPOMetric], low: float, high: float) -> None:
    metric = make()
    metric.accumulate(INPUTS, {"logps": NEW}, old_logps=OLD, advantages=ADVANTAGES)
    assert metric.n_tokens == 5
    clip = {"train/clip_ratio_low": low, "train/clip_ratio_high": high, "train/clip_ratio": low + high}
    assert metric.calculate() == pytest.approx(policy_numbers() | clip, rel=1e-5)
    assert metric.calculate() == {}


def test_clipping_by_sign() -> None:
    opposite = [1.0, -1.0]
    token = GRPOMetric(epsilon=0.2, epsilon_high=0.5)
    token.accumulate(INPUTS, {"logps": NEW}, old_logps=OLD, advantages=opposite)
    result = token.calculate()
    assert result["train/clip_ratio_low"] == 1 / 5
    assert result["train/clip_ratio_high"] == 1 / 5
    assert result["train/clip_ratio"] == 2 / 5
    sequence = GSPOMetric(epsilon=0.2, epsilon_high=0.1)
    sequence.accumulate(INPUTS, {"logps": NEW}, old_logps=OLD, advantages=opposite)
    result = sequence.calculate()
    assert result["train/clip_ratio_low"] == 1 / 2
    assert result["train/clip_ratio_high"] == 1 / 2


def test_policy_metrics_of_features_one_by_one() -> None:
    """In the form that a driver has: features with lists, outputs with one row for each."""
    features = [{"labels": [-100, 3, 4, 5]}, {"labels": [6, 7]}]
    rows = [[0.0, -1.0, -2.0, -3.0], [-0.5, -1.5]]
    metric = GRPOMetric()
    metric.accumulate(features, {"logps": rows}, old_logps=OLD, advantages=ADVANTAGES)
    result = metric.calculate()
    assert {key: result[key] for key in policy_numbers()} == pytest.approx(policy_numbers(), rel=1e-5)


def test_only_what_was_given_is_reported() -> None:
    metric = GRPOMetric()
    metric.accumulate(INPUTS, {"logps": NEW})
    assert set(metric.calculate()) == {"train/policy_confidence", "train/mean_new_logp"}
    metric.accumulate(INPUTS, {"loss": 1.0})
    assert metric.calculate() == {}


def test_entropy() -> None:
    metric = GRPOMetric(temperature=2.0)
    metric.accumulate(INPUTS, {"logps": NEW, "entropies": torch.where(LABELS >= 0, 0.5, math.nan)})
    assert metric.calculate()["train/entropy"] == 0.5
    logits = torch.zeros(2, 4, 2)
    logits[..., 1] = 2 * math.log(3)  # probabilities 1/4 and 3/4 at temperature 2
    metric.accumulate(INPUTS, {"logps": NEW, "logits": logits})
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert metric.calculate()["train/entropy"] == pytest.approx(expected)


def test_high_kl_records() -> None:
    metric = GRPOMetric(top_k_kl=2)
    for _ in range(2):
        metric.accumulate(INPUTS, {"logps": NEW}, old_logps=OLD)
    first, second = metric.high_kl_records
    assert first == second
    assert (first.token_id, first.sequence, first.position) == (3, 0, 1)
    assert (first.new_logp, first.old_logp) == (-1.0, -1.5)
    assert first.kl == pytest.approx(math.exp(0.5) - 1.5)
    metric.reset()
    assert metric.high_kl_records == []


def test_ratios_stay_finite() -> None:
    metric = GRPOMetric()
    metric.accumulate(INPUTS, {"logps": torch.zeros(2, 4)}, old_logps=[-1e4, -1e4], advantages=ADVANTAGES)
    assert all(math.isfinite(value) for value in metric.calculate().values())


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_dpo() -> None:
    labels = torch.tensor([[1, 2], [1, -100], [1, 2], [1, 2]])
    logps = torch.tensor([[-1.0, -2.0], [-4.0, math.nan], [-3.0, -3.0], [-1.0, -1.0]])
    reference = [[-2.0, -2.0], [-3.0], [-3.0, -2.0], [-1.0, -1.5]]
    metric = DPOMetric(beta=0.5)
    metric.accumulate({"labels": labels}, {"logps": logps}, ref_outputs={"logps": reference})
    assert metric.calculate() == {
        "logps/chosen": "-4.50",
        "logps/rejected": "-3.00",
        "logps/ref_chosen": "-4.50",
        "logps/ref_rejected": "-2.75",
        "rewards/chosen": "0.0000",
        "rewards/rejected": "-0.1250",
        "rewards/margins": "0.1250",
        "rewards/accuracies": "50.0%",
    }
    assert metric.calculate() == {}
    metric.accumulate({"labels": labels}, {"logps": logps})
    assert metric.calculate() == {"logps/chosen": "-4.50", "logps/rejected": "-3.00"}
    with pytest.raises(InvalidInputError, match="an even number"):
        metric.accumulate({"labels": labels[:3]}, {"logps": logps[:3]})


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_embeddings() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.8, 0.6], [-1.0, 0.0]])
    labels = torch.tensor([[1], [0], [1], [0], [0]])
    metric = EmbeddingMetric()
    metric.accumulate({"labels": labels}, {"embeddings": embeddings, "loss": 1.5}, grad_norm=2.0)
    metric.accumulate({"labels": labels}, {"embeddings": embeddings, "loss": 0.5}, grad_norm=1.0)
    # positives .6 and .6; the other similarities are .8 and −1 for the first anchor, .8 and 0 for the second
    assert metric.calculate() == {
        "pos_sim": "0.6000",
        "pos_sim_min": "0.6000",
        "pos_sim_max": "0.6000",
        "neg_sim": "0.1500",
        "loss": "1.0000",
        "grad_norm": "1.000000",
    }
    assert metric.calculate() == {}


# --- completions ------------------------------------------------------------------------------------------------------


def test_completions() -> None:
    metric = CompletionRewardMetric()
    metric.accumulate(
        rewards={"accuracy": [1.0, 0.0], "format": [1.0]},
        completion_lengths=[10, 20],
        generate_time=2.0,
        weight_sync_time=0.5,
    )
    metric.accumulate(rewards={"accuracy": [1.0, 0.0]}, completion_lengths=[30], generate_time=4.0)
    expected = {
        "profiling/Time taken: move_model_to_sampler": 0.5,
        "profiling/Time taken: generate": 3.0,
        "train/accuracy_reward": 0.5,
        "train/accuracy_reward_std": pytest.approx(math.sqrt(1 / 3)),
        "train/format_reward": 1.0,
        "train/format_reward_std": 0.0,
        "train/completion_length": 20.0,
    }
    assert metric.calculate() == expected
    assert metric.calculate() == expected
    metric.reset()
    assert metric.calculate() == {}  # no value stands for "none", so that no chart shows one
    metric.accumulate(rewards={"format": []}, generate_time=1.0)
    assert metric.calculate() == {"profiling/Time taken: generate": 1.0}


# --- names, arguments, processes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS.values())
def test_call_arguments_are_those_of_accumulate(metric) -> None:
    parameters = inspect.signature(metric.accumulate).parameters.values()
    named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(named) == sorted(metric.call_arguments)
    with pytest.raises(TypeError):
        metric(no_such_setting=1)


def test_names() -> None:
    assert all(metric_by_name(name).__name__ == name for name in METRICS)
    assert {*METRICS, "Metric", "metric_by_name"} == set(twinkle.metric.__all__)
    assert all(hasattr(twinkle.metric, name) for name in twinkle.metric.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        twinkle.metric.nothing  # noqa: B018
    with pytest.raises(UnknownNameError, match=r"unknown metric 'accuracy'; known: Accuracy, .*, TrainMetric"):
        metric_by_name("accuracy")


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, twinkle.metric; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def run_process(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    shared = {"device_mesh": "two processes", "process_group": torch.distributed.group.WORLD}
    part = slice(rank, rank + 1)
    policy, loss = GRPOMetric(**shared), LossMetric(**shared)
    policy.accumulate({"labels": LABELS[part]}, {"logps": NEW[part]}, old_logps=OLD[part], advantages=ADVANTAGES[part])
    loss.accumulate(INPUTS, {"loss": 1.0 + rank, "num_tokens": 1 + 2 * rank}, loss_reduction="sum")
    critic = PPOValueMetric(**shared)
    critic.accumulate({"labels": LABELS[part]}, {"values": NEW[part]}, old_values=OLD[part], returns=NEW[part] - 1)
    found = policy.calculate(), loss.calculate(), GRPOMetric(**shared).calculate(), critic.calculate()
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_report_the_same_as_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_process, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        policy, loss, nothing, critic = torch.load(tmp_path / f"{rank}.pt")
        assert {key: policy[key] for key in policy_numbers()} == pytest.approx(policy_numbers(), rel=1e-5)
        assert loss == {"loss": "0.7500"}
        assert nothing == {}
        assert critic == pytest.approx(
            {
                "train/value_mean": policy["train/mean_new_logp"],
                "train/return_mean": policy["train/mean_new_logp"] - 1,
                "train/value_clip_ratio": 0.4,  # 0.5, 0, 0.1; 0, 0.5
                "train/explained_variance": 1.0,  # the error is the same for all tokens
            },
            rel=1e-5,
        )
