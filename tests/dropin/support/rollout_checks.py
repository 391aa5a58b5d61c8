"""Checks of the scripts for Ray that sample: what they trained on, their losses and their weights.

After each synchronisation the sampler's log-probabilities must be those that PEFT computes from the model's weights.
Updates without dropout are repeated with PEFT or Transformers. The policy of ppo.py has dropout, whose masks cannot be
repeated: its losses are computed from the log-probabilities that its own passes returned.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dropin.support.client_runs import Call
from tests.dropin.support.hub_folder import ANSWER
from tests.dropin.support.local_runs import RATE, LocalRun
from tests.dropin.support.plain_models import (
    ADAPTER,
    FULL,
    IGNORE,
    PlainAdapter,
    PlainCritic,
    PlainModel,
    Steps,
    base_model,
    batch_logps,
    counted,
    gae,
    grpo,
    ppo,
    value_loss,
)
from tests.dropin.support.ray_runs import FULL_RATE

WEIGHT_DECAY = 0.01  # the default of set_optimizer
EPSILON = 0.2
GENERATIONS = 4
PROMPTS = 2
KL_COEF, LAMBDA = 0.1, 0.9
# fp32 sums of 64 to 100 terms in another order; vLLM and PyTorch order them differently
LOGPS = 1e-4
# Adam moves each number of an adapter by about RATE in an update, also one whose gradient is no larger than rounding
# errors. An adapter's matrix has a norm of 1 or more, and a missing update would change it by a tenth.
WEIGHTS = RATE
Rows = list[dict[str, Any]]


def _rows(call: Call) -> Rows:
    return list(call.given["inputs"])


def _kept(rows: Rows, table: Sequence[Sequence[float]]) -> list[Tensor]:
    return [counted(row, values) for row, values in zip(rows, table, strict=True)]


def _tensors(rows: Sequence[Sequence[float]]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def assert_rows(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    assert [len(row) for row in found] == [len(row) for row in expected]
    torch.testing.assert_close(torch.cat(list(found)), torch.cat(list(expected)), atol=tolerance, rtol=tolerance)


def _truth(row: dict[str, Any]) -> str:
    return str(row["answer"]).rpartition("#### ")[2]


def _completion(row: dict[str, Any]) -> str:
    return str(row["messages"][-1]["content"])


# --- what was sampled -------------------------------------------------------------------------------------------------


def sequences_of(call: Call) -> list[dict[str, Any]]:
    assert len(call.result) == len(call.given["inputs"])
    assert all(len(response["sequences"]) == 1 for response in call.result)
    return [response["sequences"][0] for response in call.result]


def check_samples(run: LocalRun, model_folder: Path) -> None:
    """Every sample names the last synchronisation, and its log-probabilities are PEFT's with those weights."""
    version, plain, after = "", None, ""
    for call in run.calls:
        if call.name == "sync_weights":
            version = call.result
            plain = PlainAdapter(model_folder, run.folder / "synced" / version)
            plain.model.eval()  # without dropout
        elif call.name == "sample":
            assert plain is not None
            assert after in ("reset_prefix_cache", "sample")  # a rollout samples once for each turn
            assert {response["weights_version"] for response in call.result} == {version}
            sequences = sequences_of(call)
            rows = [sequence["new_input_feature"] for sequence in sequences]
            drawn = [torch.tensor([pair[1] for [pair] in sequence["logprobs"]]) for sequence in sequences]
            for row, sequence in zip(rows, sequences, strict=True):
                size = len(sequence["tokens"])
                assert row["input_ids"][-size:] == [pair[0] for [pair] in sequence["logprobs"]] == sequence["tokens"]
            with torch.no_grad():
                found = plain.row_logps(rows)
            # A row of a later turn has the tokens of earlier turns as well.
            last = [each[-len(part) :] for each, part in zip(found, drawn, strict=True)]
            assert_rows(drawn, last, LOGPS)
        after = call.name
    versions = [call.result for call in run.named("sync_weights")]
    assert versions == [f"sync-{number}" for number in range(1, len(versions) + 1)]
    assert len(versions) > 1


# --- GRPO -------------------------------------------------------------------------------------------------------------


def _group_advantages(rewards: Sequence[float]) -> list[float]:
    """Return (r − mean of its group) / (standard deviation of the group + 1e-8)."""
    result = []
    for start in range(0, len(rewards), GENERATIONS):
        group = rewards[start : start + GENERATIONS]
        mean, deviation = statistics.fmean(group), statistics.stdev(group)
        result += [(reward - mean) / (deviation + 1e-8) for reward in group]
    return result


def _accuracy_and_format(rows: Rows) -> list[float]:
    form = [float(ANSWER in _completion(row)) for row in rows]
    return [each + each * (_truth(row) == "18") for row, each in zip(rows, form, strict=True)]


def accuracy_and_brevity(rows: Rows) -> list[float]:
    texts = [_completion(row) for row in rows]
    brevity = [max(0.0, 1 - len(text) / 200) if ANSWER in text else 0.0 for text in texts]
    right = [float(ANSWER in text and _truth(row) == "18") for row, text in zip(rows, texts, strict=True)]
    return [a + b for a, b in zip(right, brevity, strict=True)]


def _moves(rows: Rows) -> list[float]:
    """Return a third of a point for each move that the game has answered."""
    answers = [[m["content"] for m in row["messages"] if m["role"] == "tool"] for row in rows]
    return [sum(not text.startswith("Error") for text in each) / 3 for each in answers]


def train_by_grpo(
    run: LocalRun, model_folder: Path, steps: int, calls_per_batch: int, rewards: Callable[[Rows], list[float]]
) -> list[float]:
    """Train the same adapter with PEFT on the same rows. Return the rewards of all batches."""
    plain = PlainAdapter(model_folder, run.folder / "initial")
    optimizer = Steps(plain, RATE, WEIGHT_DECAY, steps)
    passes, metrics = run.named("forward_backward"), run.named("calculate_metric")
    assert len(passes) == steps == len(metrics) * calls_per_batch
    wanted = [rewards(list(chain.from_iterable(map(_rows, each)))) for each in _cut(passes, calls_per_batch)]
    advantages = list(chain.from_iterable(map(_group_advantages, wanted)))
    assert any(advantages)
    given = list(chain.from_iterable(call.given["advantages"] for call in passes))
    assert given == pytest.approx(advantages, abs=1e-5)
    assert any(abs(call.result["loss"]) > 1e-2 for call in passes)
    losses: list[float] = []
    for call in run.calls:
        if call.name == "forward_backward":
            rows, old = _rows(call), _tensors(call.given["old_logps"])
            now = plain.row_logps(rows)
            assert_rows(_kept(rows, call.result["logps"]), [row.detach() for row in now], LOGPS)
            loss = grpo(now, old, call.given["advantages"], EPSILON)
            losses.append(loss.item())
            assert call.result["loss"] == pytest.approx(losses[-1], abs=LOGPS)
            optimizer.take(loss)
        elif call.name == "calculate_metric":
            assert float(call.result["loss"]) == pytest.approx(statistics.fmean(losses), abs=1.5e-4)
            losses = []
        elif call.name == "save":
            plain.assert_saved(run.folder.parent / call.result / ADAPTER, tolerance=WEIGHTS)
    return list(chain.from_iterable(wanted))


def _cut(calls: Sequence[Call], size: int) -> list[Sequence[Call]]:
    return [calls[start : start + size] for start in range(0, len(calls), size)]


def assert_trained_on_samples(run: LocalRun) -> None:
    """The rows of the passes are the sampled ones, with the sampler's log-probabilities as old ones."""
    drawn = list(chain.from_iterable(map(sequences_of, run.named("sample"))))
    passes = run.named("forward_backward")
    rows = list(chain.from_iterable(map(_rows, passes)))
    old = list(chain.from_iterable(call.given["old_logps"] for call in passes))
    assert [row["input_ids"] for row in rows] == [each["new_input_feature"]["input_ids"] for each in drawn]
    assert old == [[pair[1] for [pair] in each["logprobs"]] for each in drawn]


def assert_logged(run: LocalRun, rewards: Sequence[float]) -> None:
    """The mean reward of each batch is in the log."""
    for start in range(0, len(rewards), PROMPTS * GENERATIONS):
        mean = statistics.fmean(rewards[start : start + PROMPTS * GENERATIONS])
        assert any(abs(logged - mean) < 1e-6 for logged in _logged(run, "train/total_reward"))


def _logged(run: LocalRun, key: str) -> list[float]:
    parts = run.output.split(f"'{key}': ")[1:]
    return [float(part.partition(",")[0]) for part in parts]


def check_grpo(run: LocalRun, model_folder: Path) -> None:
    check_samples(run, model_folder)
    rewards = train_by_grpo(run, model_folder, steps=4, calls_per_batch=2, rewards=_accuracy_and_format)
    assert_trained_on_samples(run)
    assert_logged(run, rewards)
    names = [Path(call.result).name for call in run.named("save")]
    assert names == ["grpo-gsm8k-checkpoint-3", "grpo-gsm8k-checkpoint"]
    assert "Training completed. optim_steps=4" in run.output


def check_short_math_grpo(run: LocalRun, model_folder: Path) -> None:
    check_samples(run, model_folder)
    rewards = train_by_grpo(run, model_folder, steps=6, calls_per_batch=3, rewards=accuracy_and_brevity)
    assert_trained_on_samples(run)
    assert_logged(run, rewards)
    assert [Path(call.result).name for call in run.named("save")] == ["math-grpo-final"]
    assert "Training completed. optim_steps=6" in run.output


def check_multi_turn_grpo(run: LocalRun, model_folder: Path) -> None:
    check_samples(run, model_folder)
    rewards = train_by_grpo(run, model_folder, steps=6, calls_per_batch=3, rewards=_moves)
    assert_logged(run, rewards)
    rows = list(chain.from_iterable(map(_rows, run.named("forward_backward"))))
    assert {row["turns"] for row in rows} - {1}
    for row in rows:
        assert len(row["logprobs"]) == sum(label != IGNORE for label in row["labels"])
    assert any(message["role"] == "tool" for row in rows for message in row["messages"])
    assert [Path(call.result).name for call in run.named("save")] == ["multi-turn-grpo-final"]


# --- PPO --------------------------------------------------------------------------------------------------------------


class _Batch:
    """What GAE must have made of one batch, by row: the same row always has the same numbers."""

    def __init__(self, rows: Rows, old: list[Tensor], reference: list[Tensor], values: list[Tensor]) -> None:
        rewards = []
        for total, before, base in zip(_accuracy_and_format(rows), old, reference, strict=True):
            tokens = -KL_COEF * (before - base)
            tokens[-1] += total
            rewards.append(tokens.tolist())
        plain = [gae(reward, value.tolist(), 1.0, LAMBDA) for reward, value in zip(rewards, values, strict=True)]
        every = torch.cat(plain)
        assert every.std() > 0.1  # rewards differ; otherwise the whitened advantages would be noise
        mean, deviation = every.mean(), every.std(correction=0)
        self.advantages = _by_row(rows, [(row - mean) / (deviation + 1e-8) for row in plain])
        self.returns = _by_row(rows, [row + value for row, value in zip(plain, values, strict=True)])
        self.old = _by_row(rows, old)
        self.values = _by_row(rows, values)

    def check(self, call: Call) -> None:
        """The rows that a pass was given have these numbers."""
        for name, numbers in (
            ("advantages", self.advantages),
            ("returns", self.returns),
            ("old_logps", self.old),
            ("old_values", self.values),
        ):
            if name in call.given:
                expected = [numbers[_key(row)] for row in _rows(call)]
                assert_rows(_tensors(call.given[name]), expected, LOGPS)


def _key(row: dict[str, Any]) -> str:
    return json.dumps(row["input_ids"])


def _by_row(rows: Rows, numbers: Sequence[Tensor]) -> dict[str, Tensor]:
    return {_key(row): values for row, values in zip(rows, numbers, strict=True)}


class _Passes:
    """The passes of one model since its last metrics, token by token."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, loss: float, **tokens: Sequence[Tensor]) -> None:
        self.losses.append(loss)
        for name, rows in tokens.items():
            self.parts.setdefault(name, []).append(torch.cat(list(rows)).detach())

    def take(self, name: str) -> Tensor:
        return torch.cat(self.parts[name])

    def check_loss(self, metrics: dict[str, Any]) -> None:
        assert float(metrics["loss"]) == pytest.approx(statistics.fmean(self.losses), abs=1.5e-4)


def _check_policy_metrics(metrics: dict[str, Any], passes: _Passes) -> None:
    new, old, advantages = passes.take("new"), passes.take("old"), passes.take("advantages")
    difference = new - old
    ratio = difference.exp()
    low = ((ratio < 1 - EPSILON) & (advantages < 0)).float().mean()
    high = ((ratio > 1 + EPSILON) & (advantages > 0)).float().mean()
    expected = {
        "mean_new_logp": new.mean(),
        "mean_old_logp": old.mean(),
        "approx_kl": (ratio - 1 - difference).mean(),
        "token_ratio_max": ratio.max(),
        "clip_ratio_low": low,
        "clip_ratio_high": high,
        "clip_ratio": low + high,
    }
    for name, value in expected.items():
        assert metrics[f"train/{name}"] == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


def _check_value_metrics(metrics: dict[str, Any], passes: _Passes) -> None:
    values, old, returns = passes.take("values"), passes.take("old"), passes.take("returns")
    advantages = passes.take("advantages")
    expected = {
        "value_mean": values.mean(),
        "return_mean": returns.mean(),
        "value_clip_ratio": ((values - old).abs() > EPSILON).float().mean(),
        "explained_variance": 1 - (returns - values).var(correction=0) / returns.var(correction=0),
        "advantage_mean": advantages.mean(),
        "advantage_std": advantages.std(correction=0),
    }
    for name, value in expected.items():
        assert metrics[f"train/{name}"] == pytest.approx(float(value), rel=1e-4, abs=2e-4), name


def check_ppo(run: LocalRun, model_folder: Path) -> None:
    check_samples(run, model_folder)
    base, critic = base_model(model_folder), PlainCritic(model_folder)
    updates = 2 * 2 * 2  # steps, epochs, mini-batches
    critic_steps = Steps(critic, FULL_RATE, WEIGHT_DECAY, updates)
    rows: Rows = []
    old: list[Tensor] = []
    reference: list[Tensor] = []
    batch: _Batch | None = None
    of_policy, of_critic = _Passes(), _Passes()
    for call in run.calls:
        if call.name == "sample":
            sequences = sequences_of(call)
            rows = [sequence["new_input_feature"] for sequence in sequences]
            old = [torch.tensor([pair[1] for [pair] in sequence["logprobs"]]) for sequence in sequences]
        elif call.name == "forward_only" and "logps" in call.result:
            assert call.given["disable_lora"] is True
            reference = _kept(rows, call.result["logps"])
            with torch.no_grad():
                assert_rows(reference, batch_logps(base, rows), LOGPS)
        elif call.name == "forward_only":
            values = _kept(rows, call.result["values"])
            with torch.no_grad():
                assert_rows(values, critic.row_values(rows), LOGPS)
            batch = _Batch(rows, old, reference, values)
        elif call.name == "forward_backward":
            assert batch is not None
            batch.check(call)
            if "values" in call.result:
                _check_value_pass(call, critic, critic_steps, of_critic)
            else:
                _check_policy_pass(call, of_policy)
        elif call.name == "calculate_metric" and "train/value_mean" in call.result:
            of_critic.check_loss(call.result)
            _check_value_metrics(call.result, of_critic)
            of_critic = _Passes()
        elif call.name == "calculate_metric":
            of_policy.check_loss(call.result)
            _check_policy_metrics(call.result, of_policy)
            of_policy = _Passes()
    assert len(run.named("forward_backward")) == 2 * updates
    assert len(run.named("calculate_metric")) == 4
    _check_dropout([call for call in run.named("forward_backward") if "logps" in call.result][updates // 2])
    _check_saved_by_ppo(run, model_folder, critic)
    assert "Training completed. Total steps: 2" in run.output


def _check_policy_pass(call: Call, passes: _Passes) -> None:
    new, old = _kept(_rows(call), call.result["logps"]), _tensors(call.given["old_logps"])
    advantages = _tensors(call.given["advantages"])
    loss = float(ppo(new, old, advantages, EPSILON))
    assert call.result["loss"] == pytest.approx(loss, abs=1e-5)
    passes.add(loss, new=new, old=old, advantages=advantages)


def _check_dropout(first: Call) -> None:
    """Dropout changes what is trained. In the first pass of a batch, nothing else differs from what was sampled."""
    new, old = _kept(_rows(first), first.result["logps"]), _tensors(first.given["old_logps"])
    assert (torch.cat(new) - torch.cat(old)).abs().max() > 10 * LOGPS


def _check_value_pass(call: Call, critic: PlainCritic, steps: Steps, passes: _Passes) -> None:
    rows = _rows(call)
    values, old, returns = critic.row_values(rows), _tensors(call.given["old_values"]), _tensors(call.given["returns"])
    assert_rows(_kept(rows, call.result["values"]), [row.detach() for row in values], LOGPS)
    loss = value_loss(values, old, returns, EPSILON)
    assert call.result["loss"] == pytest.approx(loss.item(), abs=LOGPS)
    passes.add(loss.item(), values=values, old=old, returns=returns, advantages=_tensors(call.given["advantages"]))
    steps.take(loss)


def _check_saved_by_ppo(run: LocalRun, model_folder: Path, critic: PlainModel) -> None:
    policy, value = (run.folder.parent / call.result for call in run.named("save"))
    assert (policy.name, value.name) == ("ppo-policy-2", "ppo-critic-2")
    critic.assert_saved(value / FULL, tolerance=FULL_RATE)
    before, after = (PlainAdapter(model_folder, folder).trained for folder in (run.folder / "synced/sync-2", policy))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((policy / "adapter_config.json").read_text())["lora_dropout"] == 0.05


ROLLOUT_CHECKS: dict[str, Callable[[LocalRun, Path], None]] = {
    "grpo": check_grpo,
    "short_math_grpo": check_short_math_grpo,
    "multi_turn_grpo": check_multi_turn_grpo,
    "ppo": check_ppo,
}
