"""What the client scripts must have done: the numbers that they got, compared with plain computations.

Each check takes what a script did, the server, and the folder of the base model. The same checks apply to our client
and to twinkle-kit's.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dropin.support.client_runs import UPLOAD, Call, HubServer, Run
from tests.dropin.support.hub_folder import ANSWER
from tests.dropin.support.plain_models import (
    IGNORE,
    PlainAdapter,
    base_model,
    batch_logps,
    counted,
    cross_entropy,
    dpo,
    embeddings,
    grpo,
    infonce,
)

Check = Callable[[Run, HubServer, Path], None]
WEIGHT_DECAY = 0.01  # the default of set_optimizer


def _close(value: float) -> Any:
    return pytest.approx(value, rel=1e-5, abs=1e-5)


def _adapter(run: Run, server: HubServer, base: Path) -> PlainAdapter:
    (initial,) = run.named("initial")
    return PlainAdapter(base, server.checkpoint(initial.result))


def _loss(call: Call) -> float:
    return float(call.result["result"]["loss"])


def _given_rows(call: Call) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in call.given["inputs"]]


# --- the native client ------------------------------------------------------------------------------------------------


def self_cognition(run: Run, server: HubServer, base: Path) -> None:
    """Ten passes, an update after every second one; losses, gradient norms and metrics are PEFT's."""
    passes = run.named("forward_backward")
    assert len(passes) == 10
    plain = _adapter(run, server, base)
    optimizer = torch.optim.Adam(plain.parameters, lr=1e-4, weight_decay=WEIGHT_DECAY)
    norms, losses = [], []
    for number, call in enumerate(passes, 1):
        rows = plain.row_logps(_given_rows(call))
        loss = cross_entropy(rows)
        losses.append(float(loss))
        assert _loss(call) == _close(losses[-1])
        (loss / 2).backward()  # CrossEntropyLoss is a mean: two passes are averaged
        if number % 2 == 0:
            norms.append(plain.clip(1.0))
            optimizer.step()
            optimizer.zero_grad()
    metrics = [call.result["result"] for call in run.named("calculate_metric")]
    pairs = zip(losses[0::2], losses[1::2], strict=True)
    assert [float(metric["loss"]) for metric in metrics] == pytest.approx([sum(pair) / 2 for pair in pairs], abs=1e-4)
    assert [float(metric["grad_norm"]) for metric in metrics] == pytest.approx(norms, rel=1e-3, abs=2e-6)
    assert losses[-1] < losses[0]
    assert "Current is step 10 of 15, metric: {" in run.output
    assert "Reached max_steps=10, stopping training." in run.output
    assert run.named("get_train_configs")[0].result["result"]


def native_dpo(run: Run, server: HubServer, base: Path) -> None:
    """The reference is the base model; losses and margins follow from the log-probabilities."""
    passes, references = run.named("forward_backward"), run.named("forward_only")
    assert len(passes) == len(references) == 6
    plain = base_model(base)
    for call, reference in zip(passes, references, strict=True):
        rows = _given_rows(call)
        assert rows == _given_rows(reference)
        given = reference.result["result"]["logps"]
        assert call.given["ref_outputs"]["logps"] == given
        before = [counted(row, values) for row, values in zip(rows, given, strict=True)]
        with torch.no_grad():
            for values, expected in zip(before, batch_logps(plain, rows), strict=True):
                assert torch.allclose(values, expected, atol=1e-5)
        now = [counted(row, values) for row, values in zip(rows, call.result["result"]["logps"], strict=True)]
        loss, _ = dpo(now, before, beta=0.1, sft_weight=1.0)
        assert _loss(call) == _close(float(loss))
    metrics = [call.result["result"] for call in run.named("calculate_metric")]
    assert len(metrics) == 3
    assert float(metrics[-1]["rewards/margins"]) > 0
    assert re.search(r"\[Step 6/6\] .*rewards/margins", run.output)
    assert re.search(r"Saved checkpoint: .*twinkle://\S+/weights/dpo-lora-final", run.output)


def _grpo_losses(calls: list[Call]) -> None:
    for call in calls:
        rows = _given_rows(call)
        now = [counted(row, values) for row, values in zip(rows, call.result["result"]["logps"], strict=True)]
        old = [torch.tensor(values) for values in call.given["old_logps"]]
        assert _loss(call) == _close(float(grpo(now, old, call.given["advantages"], epsilon=0.2)))


def native_grpo(run: Run, server: HubServer, base: Path) -> None:
    """Old log-probabilities are those of the sampled adapter; the losses are the clipped surrogate of them."""
    samples, passes = run.named("sample"), run.named("forward_backward")
    assert len(samples) == 4
    assert passes  # answers differ, so some steps have advantages
    _grpo_losses(passes)
    plain = base_model(base)  # before the first update the adapter changes nothing
    rows = _given_rows(passes[0])
    with torch.no_grad():
        for old, expected in zip(passes[0].given["old_logps"], batch_logps(plain, rows), strict=True):
            assert len(old) == len(expected)
            assert torch.allclose(torch.tensor(old), expected, atol=1e-4)
    assert any(
        ANSWER in (sequence["decoded"] or "")
        for call in samples
        for response in call.result
        for sequence in response["sequences"]
    )
    assert len(re.findall(r"Step \d: ", run.output)) == 4
    assert "train/total_reward" in run.output
    assert re.search(r"Saved final checkpoint: twinkle://\S+/weights/grpo-countdown-final", run.output)


def multi_turn_rollout(run: Run, server: HubServer, base: Path) -> None:
    """Rollouts have several turns and rewards of the environment; losses are the clipped surrogate."""
    passes = run.named("forward_backward")
    assert len(passes) == 3
    _grpo_losses(passes)
    rows = [row for call in passes for row in call.given["inputs"]]
    assert {row["turns"] for row in rows} - {1}
    assert all(len(row["logprobs"]) == sum(label != IGNORE for label in row["labels"]) for row in rows)
    assert any(message["role"] == "tool" for row in rows for message in row["messages"])
    rewards = [float(value) for value in re.findall(r"avg_reward=([\d.]+)", run.output)]
    assert len(rewards) == 3
    assert max(rewards) > 0
    assert "Multi-turn rollout example finished." in run.output


def embedding(run: Run, server: HubServer, base: Path) -> None:
    """Ten steps of InfoNCE equal PEFT's, and the pairs come closer."""
    passes = run.named("forward_backward")
    assert len(passes) == 10
    plain = _adapter(run, server, base)
    optimizer = torch.optim.Adam(plain.parameters, lr=1e-4, weight_decay=WEIGHT_DECAY)
    for call in passes:
        loss = infonce(embeddings(plain.model, call.given["inputs"]), temperature=0.07)
        assert _loss(call) == pytest.approx(float(loss), rel=1e-4, abs=1e-5)
        loss.backward()
        plain.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    metrics = [call.result["result"] for call in run.named("calculate_metric")]
    assert len(metrics) == 10
    assert float(metrics[-1]["loss"]) < float(metrics[0]["loss"])
    assert {"pos_sim", "neg_sim"} <= metrics[-1].keys()


def native_sample(run: Run, server: HubServer, base: Path) -> None:
    (call,) = run.named("sample")
    assert [len(response["sequences"]) for response in call.result] == [2, 2, 2, 2]
    assert len(re.findall(r"Generated 2 sequences", run.output)) == 4


def upload_to_hub(run: Run, server: HubServer, base: Path) -> None:
    assert f"Upload complete: https://modelscope.cn/models/{UPLOAD}" in run.output
    uploaded = server.hub / "uploads" / UPLOAD
    assert (uploaded / "adapter_model.safetensors").exists()
    assert (uploaded / "adapter_config.json").exists()


# --- the tinker SDK ---------------------------------------------------------------------------------------------------


def _datum_rows(call: Call) -> list[dict[str, Any]]:
    return [
        {"input_ids": datum["tokens"], "labels": datum["inputs"]["target_tokens"], **datum["inputs"]}
        for datum in call.given["data"]
    ]


def _cross_entropy_training(run: Run, server: HubServer, base: Path, count: int) -> None:
    """Each pass and update are PEFT's: log-probabilities, and the loss per token that the script prints."""
    passes = run.named("forward_backward")
    assert len(passes) == count
    plain = _adapter(run, server, base)
    optimizer = torch.optim.Adam(plain.parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-12)
    printed = [float(value) for value in re.findall(r"Loss per token: ([\d.]+)", run.output)]
    assert len(printed) == count
    for call, shown in zip(passes, printed, strict=True):
        total, tokens = torch.zeros(()), 0.0
        rows = _datum_rows(call)
        for row, output, found in zip(rows, call.result["outputs"], plain.row_logps(rows), strict=True):
            assert torch.allclose(torch.tensor(output["logprobs"]), found.detach(), atol=2e-5)
            weights = torch.tensor(row["weights"], dtype=torch.float32)
            total, tokens = total - (found * weights).sum(), tokens + float(weights.sum())
        assert shown == pytest.approx(float(total) / tokens, abs=1e-4)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert printed[-1] < printed[0]


def tinker_lora(run: Run, server: HubServer, base: Path) -> None:
    _cross_entropy_training(run, server, base, count=10)
    assert re.search(r"Saved checkpoint for epoch 1 to \S+/weights/pig-latin-lora-epoch-1\nPublished", run.output)


def tinker_self_cognition(run: Run, server: HubServer, base: Path) -> None:
    _cross_entropy_training(run, server, base, count=6)
    assert re.search(r"Saved checkpoint to \S+/weights/twinkle-lora-2", run.output)


def tinker_dpo(run: Run, server: HubServer, base: Path) -> None:
    """References are the base model's, and each loss and update are PEFT's."""
    references, passes = run.named("forward"), run.named("forward_backward")
    assert len(references) == len(passes) == 3
    plain, untouched = _adapter(run, server, base), base_model(base)
    optimizer = torch.optim.Adam(plain.parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-12)
    for call in passes:
        rows = _datum_rows(call)
        masks = [torch.tensor(row["weights"]) != 0 for row in rows]
        before = [torch.tensor(row["ref_logps"])[mask] for row, mask in zip(rows, masks, strict=True)]
        with torch.no_grad():
            for values, expected, mask in zip(before, batch_logps(untouched, rows), masks, strict=True):
                assert torch.allclose(values, expected[mask], atol=2e-5)
        now = [values[mask] for values, mask in zip(plain.row_logps(rows), masks, strict=True)]
        loss, margin = dpo(now, before, beta=0.1, sft_weight=1.0)
        metrics = call.result["metrics"]
        assert metrics["loss:mean"] == _close(float(loss))
        assert metrics["rewards/margins:mean"] == pytest.approx(float(margin), abs=1e-4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert re.search(r"Saved checkpoint to \S+/weights/dpo-lora-final", run.output)


def tinker_grpo(run: Run, server: HubServer, base: Path) -> None:
    """Each loss is the importance-sampling objective of PEFT's log-probabilities."""
    passes = run.named("forward_backward")
    assert passes
    plain = _adapter(run, server, base)
    optimizer = torch.optim.Adam(plain.parameters, lr=2e-5, betas=(0.9, 0.95), eps=1e-12)
    for call in passes:
        loss = torch.zeros(())
        rows = _datum_rows(call)
        for row, found in zip(rows, plain.row_logps(rows), strict=True):
            ratio = (found - torch.tensor(row["logprobs"])).exp()
            loss = loss - (ratio * torch.tensor(row["advantages"]))[torch.tensor(row["weights"]) != 0].sum()
        assert call.result["metrics"]["loss:sum"] == pytest.approx(float(loss), rel=1e-4, abs=1e-3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert re.search(r"Saved final checkpoint to \S+/weights/gsm8k-grpo-final", run.output)


def tinker_sample(run: Run, server: HubServer, base: Path) -> None:
    assert re.search(r"Responses:\n0: '.+'", run.output)


CHECKS: dict[str, Check] = {
    "twinkle/self_cognition": self_cognition,
    "twinkle/dpo": native_dpo,
    "twinkle/short_math_grpo": native_grpo,
    "twinkle/multi_turn_rollout": multi_turn_rollout,
    "twinkle/embedding": embedding,
    "twinkle/sample": native_sample,
    "twinkle/upload_to_hub": upload_to_hub,
    "tinker/lora": tinker_lora,
    "tinker/self_cognition": tinker_self_cognition,
    "tinker/dpo": tinker_dpo,
    "tinker/short_math_grpo": tinker_grpo,
    "tinker/sample": tinker_sample,
    "tinker/upload_to_hub": upload_to_hub,
}


def assert_done(name: str, run: Run, server: HubServer, base: Path) -> None:
    """Fail with the script's output if it ended with an error; else compare its numbers."""
    assert run.code == 0, run.output[-3000:]
    CHECKS[name](run, server, base)
