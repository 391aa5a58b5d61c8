"""The scripts for torchrun in two processes: losses, evaluations and saved weights are those of plain PEFT in one."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from tests.dropin.support.hub_folder import EXPERTS
from tests.dropin.support.local_runs import RATE, LocalRun, run_local
from tests.dropin.support.plain_models import ADAPTER, PlainAdapter, cross_entropy
from tests.dropin.support.plain_rows import Rows, batches, encoded
from twinkle.preprocessor import SelfCognitionProcessor


def _run(name: str, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    return run_local(name, tmp_path_factory.mktemp(name), model_folder.parents[2])


@pytest.fixture(scope="module")
def self_cognition(model_folder: Path) -> Rows:
    return encoded(model_folder, "swift/self-cognition", SelfCognitionProcessor("twinkle model", "ModelScope team"))


@pytest.mark.parallel
def test_fsdp2(self_cognition: Rows, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = _run("fsdp2", model_folder, tmp_path_factory)
    plain = PlainAdapter(model_folder, run.folder / "initial")
    optimizer = torch.optim.Muon(plain.parameters, lr=RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, 3)
    losses, evaluations = [], []
    for number, batch in enumerate(batches(self_cognition, 24, 8), 1):
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
    plain.assert_saved(run.folder / "output/last-checkpoint" / ADAPTER, tolerance=5e-2)
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
    for number, batch in enumerate(batches(self_cognition, 20, 4), 1):
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
    plain.assert_saved(run.folder / "output/last-checkpoint" / ADAPTER)


@pytest.mark.parallel
@pytest.mark.parametrize("name", ["ep_fsdp2_lora_qwen3_5_moe", "ep_fsdp2_lora_deepseek_v4"])
def test_adapters_on_experts(name: str, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Adapters on attention and, by ``target_parameters``, on experts; each process holds half of all weights."""
    run = _run(name, model_folder, tmp_path_factory)
    folder = model_folder.parents[1] / EXPERTS
    rows = encoded(folder, "swift/self-cognition", SelfCognitionProcessor("twinkle model", "ModelScope team"))
    plain = PlainAdapter(folder, run.folder / "initial")
    assert any("experts" in name for name in plain.trained)
    optimizer = torch.optim.AdamW(plain.parameters, lr=RATE)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, 3)
    losses = []
    for batch in batches(rows, 24, 8):
        loss = cross_entropy(plain.row_logps(batch))
        losses.append(loss.item())
        loss.backward()
        plain.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert run.losses == pytest.approx(losses, abs=1.5e-4)
    assert losses[-1] < losses[0]
    (saved,) = run.folder.glob("**/last-checkpoint")
    plain.assert_saved(saved / ADAPTER)
