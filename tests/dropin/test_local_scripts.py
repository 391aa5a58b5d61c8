"""The local scripts in two processes: losses, evaluations and saved weights are those of plain PEFT in one process."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import get_cosine_schedule_with_warmup

from tests.dropin.support.local_runs import RATE, LocalRun, run_local
from tests.dropin.support.plain_adapter import PlainAdapter, base_model, batch_logps, cross_entropy, dpo
from twinkle import exists
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.preprocessor import EmojiDPOProcessor, SelfCognitionProcessor

Rows = list[dict[str, Any]]


def _encoded(model_folder: Path, name: str, preprocessor: Any, template: str = "Qwen3_5Template") -> Rows:
    dataset = Dataset(DatasetMeta(str(model_folder.parents[2] / "datasets" / name / "train.jsonl")))
    dataset.set_template(template, model_id=str(model_folder))
    dataset.map(preprocessor)
    dataset.encode()
    return [dataset[number] for number in range(len(dataset))]


def _batches(rows: Rows, count: int, size: int) -> list[Rows]:
    wrapped = [rows[number % len(rows)] for number in range(count)]
    return [wrapped[start : start + size] for start in range(0, count, size)]


def _assert_same_weights(found: Path, plain: PlainAdapter, tolerance: float = 1e-4) -> None:
    """Compare weights. Adam magnifies differences in the order of sums."""
    saved = load_file(found / "adapter_model.safetensors")
    named = {
        name.replace(".default.", "."): value for name, value in plain.model.named_parameters() if value.requires_grad
    }
    assert saved.keys() == named.keys()
    for name, value in named.items():
        assert (saved[name] - value.detach()).norm() <= tolerance * value.norm(), name


def _run(name: str, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    return run_local(name, tmp_path_factory.mktemp(name), model_folder.parents[2])


@pytest.fixture(scope="module")
def self_cognition(model_folder: Path) -> Rows:
    return _encoded(model_folder, "swift/self-cognition", SelfCognitionProcessor("twinkle model", "ModelScope team"))


@pytest.mark.parallel
def test_fsdp2(self_cognition: Rows, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = _run("fsdp2", model_folder, tmp_path_factory)
    plain = PlainAdapter(model_folder, run.folder / "initial")
    optimizer = torch.optim.Muon(plain.parameters, lr=RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, 3)
    losses, evaluations = [], []
    for number, batch in enumerate(_batches(self_cognition, 24, 8), 1):
        loss = cross_entropy(plain.row_logps(batch))
        losses.append(float(loss))
        loss.backward()
        plain.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if number % 2 == 0:
            with torch.no_grad():
                evaluations.append(float(cross_entropy(plain.row_logps(self_cognition[:8]))))
    # Muon multiplies matrices in bf16. FSDP2 splits them, so that torch rounds parts of a sum to bf16 before it adds
    # them: the updates differ by up to 3 % from those of whole matrices, and the losses by up to 1e-3.
    assert run.losses == pytest.approx(losses, abs=2e-3)
    assert losses[-1] < losses[0] - 0.1
    shown = [float(value) for value in re.findall(r"Eval loss: ([\d.]+)", run.output)]
    assert sorted(set(shown)) == pytest.approx(evaluations, abs=2e-3)
    _assert_same_weights(run.folder / "output/last-checkpoint", plain, tolerance=5e-2)
    state = json.loads((run.folder / "output/last-checkpoint/trainer_state.json").read_text())
    assert (state["cur_step"], state["consumed_train_samples"]) == (3, 24)
    assert (run.folder / "output/checkpoint-2/optimizer.pt").exists()


@pytest.mark.parallel
def test_sp_fsdp_dense(self_cognition: Rows, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = _run("sp_fsdp_dense", model_folder, tmp_path_factory)
    plain = PlainAdapter(model_folder, run.folder / "initial")
    optimizer = torch.optim.AdamW(plain.parameters, lr=RATE)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, 5)
    losses: list[float] = []
    window: list[torch.Tensor] = []
    for number, batch in enumerate(_batches(self_cognition, 20, 4), 1):
        rows = plain.row_logps(batch)
        losses.append(float(cross_entropy(rows)))
        window += rows
        if number % 2 == 0:  # the gradient is a mean over the tokens of both passes
            cross_entropy(window).backward()
            plain.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            window = []
    assert run.losses == pytest.approx(losses, abs=1.5e-4)
    assert losses[-1] < losses[0]
    _assert_same_weights(run.folder / "output/last-checkpoint", plain)


def _dpo_loss(plain: PlainAdapter, rows: Rows, references: Sequence[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Return the mean of both workers' losses: the SFT part of each is a mean over the tokens of its own rows."""
    now = plain.row_logps(rows)
    half = len(rows) // 2
    parts = [dpo(now[part], references[part], beta=0.1, sft_weight=1.0) for part in (slice(half), slice(half, None))]
    losses, margins = zip(*parts, strict=True)
    return torch.stack(losses).mean(), float(torch.stack(margins).mean())


@pytest.mark.ray
def test_dpo_lora(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not exists("ray"):
        pytest.skip("Ray is not installed; `make test-ray` does that")
    run = _run("dpo_lora", model_folder, tmp_path_factory)
    name, processor = "hjh0119/shareAI-Llama3-DPO-zh-en-emoji", EmojiDPOProcessor("You are a helpful assistant.")
    pairs = _encoded(model_folder, name, processor, template="Template")
    plain, base = PlainAdapter(model_folder, run.folder / "initial"), base_model(model_folder)
    optimizer = torch.optim.AdamW(plain.parameters, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3, eta_min=RATE * 0.1)
    metrics = [call.result for call in run.named("calculate_metric")]
    for batch, metric in zip(_batches(pairs, 12, 4), metrics, strict=True):
        rows = [pair[side] for pair in batch for side in ("positive", "negative")]
        with torch.no_grad():
            references = batch_logps(base, rows)
        loss, margin = _dpo_loss(plain, rows, references)
        assert float(metric["loss"]) == pytest.approx(float(loss), abs=1.5e-4)
        assert float(metric["rewards/margins"]) == pytest.approx(margin, abs=1.5e-4)
        loss.backward()
        plain.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert float(metrics[-1]["rewards/margins"]) > 0
    assert "Training completed. Total steps: 3" in run.output
    _assert_same_weights(run.folder / "output/dpo-lora-final-checkpoint", plain)
    assert (run.folder / "output/dpo-lora-checkpoint-2/adapter_model.safetensors").exists()
