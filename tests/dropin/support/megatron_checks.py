"""Checks of the scripts for Ray with models of Megatron: two processes compute what PEFT and Transformers compute."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dropin.support.client_runs import Call
from tests.dropin.support.hub_folder import MODEL, TEACHER
from tests.dropin.support.local_runs import RATE, LocalRun
from tests.dropin.support.plain_models import (
    ADAPTER,
    FULL,
    IGNORE,
    PlainAdapter,
    PlainModel,
    Steps,
    base_model,
    padded_rows,
)
from tests.dropin.support.ray_checks import check_dpo
from tests.dropin.support.ray_runs import FULL_RATE
from tests.dropin.support.rollout_checks import (
    LOGPS,
    WEIGHT_DECAY,
    WEIGHTS,
    accuracy_and_brevity,
    assert_logged,
    assert_rows,
    assert_trained_on_samples,
    check_grpo,
    check_samples,
    check_short_math_grpo,
    sequences_of,
    train_by_grpo,
)

TOPK, BETA, TEMPERATURE = 8, 0.25, 2.0  # of the distillation, as in ray_runs


def _check_dpo_lora(run: LocalRun, model_folder: Path) -> None:
    plain = PlainAdapter(model_folder, run.folder / "initial")
    check_dpo(run, model_folder, plain, Steps(plain, RATE, WEIGHT_DECAY, 3), workers=1)
    plain.assert_saved(run.folder / "output/dpo-lora-final-checkpoint" / ADAPTER, tolerance=WEIGHTS)
    assert (run.folder / "output/dpo-lora-checkpoint-2" / ADAPTER).exists()


def _check_dpo_multi_lora(run: LocalRun, model_folder: Path) -> None:
    _check_dpo_lora(run, model_folder)
    for call in run.calls:
        assert call.given["adapter_name"] == "default"


def _check_dpo_full(run: LocalRun, model_folder: Path) -> None:
    plain = PlainModel(model_folder)
    check_dpo(run, model_folder, plain, Steps(plain, FULL_RATE, 0.0, 3), workers=1)
    plain.assert_saved(run.folder / "output/dpo-full-final-checkpoint" / FULL, tolerance=FULL_RATE)
    assert base_model(run.folder / "output/dpo-full-checkpoint-2").num_parameters() == plain.model.num_parameters()
    for call in run.named("forward_backward"):  # the reference's outputs went from worker to worker
        assert re.fullmatch(r"<result of '.*'\.forward_only: not collected yet>", call.given["ref_outputs"])


def _check_short_math_grpo_multi_lora(run: LocalRun, model_folder: Path) -> None:
    """Each batch is sampled with the adapter that was saved just before, and trained on as PEFT trains."""
    saved = ""
    for call in run.calls:
        if call.name == "save":
            saved = call.result
        elif call.name == "sample":
            assert call.given["adapter_path"] == saved
            plain = PlainAdapter(model_folder, run.folder.parent / saved)
            sequences = sequences_of(call)
            drawn = [torch.tensor([pair[1] for [pair] in sequence["logprobs"]]) for sequence in sequences]
            with torch.no_grad():
                found = plain.row_logps([sequence["new_input_feature"] for sequence in sequences])
            assert_rows(drawn, found, LOGPS)
    rewards = train_by_grpo(run, model_folder, steps=6, calls_per_batch=3, rewards=accuracy_and_brevity)
    assert_trained_on_samples(run)
    assert_logged(run, rewards)
    assert [Path(call.result).name for call in run.named("save")] == ["sampled-0", "sampled-3", "math-grpo-final"]
    assert "Training completed. optim_steps=6" in run.output


# --- distillation -----------------------------------------------------------------------------------------------------


def _logits(model: Any, rows: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the logits of all rows, padded on the right, and where labels count."""
    ids, mask, labels = padded_rows(rows)
    return model(input_ids=ids, attention_mask=mask).logits.float(), labels != IGNORE


def _distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the generalised Jensen-Shannon divergence over the teacher's likeliest tokens, a mean over (N, V) rows."""
    best = teacher.topk(TOPK, dim=-1)
    log_t = F.log_softmax(best.values / TEMPERATURE, dim=-1)
    log_s = F.log_softmax(student.gather(-1, best.indices) / TEMPERATURE, dim=-1)
    mixture = BETA * log_t.exp() + (1 - BETA) * log_s.exp()
    to_teacher = F.kl_div(mixture.log(), log_t, reduction="batchmean", log_target=True)
    to_student = F.kl_div(mixture.log(), log_s, reduction="batchmean", log_target=True)
    return BETA * to_teacher + (1 - BETA) * to_student


def _check_distillation(run: LocalRun, model_folder: Path, final: str) -> None:
    """Train the same adapter with PEFT on the same rows, with the logits of the teacher's model from Transformers."""
    plain = PlainAdapter(model_folder, run.folder / "initial")
    teacher = base_model(Path(str(model_folder).replace(MODEL, TEACHER)))
    steps = Steps(plain, RATE, WEIGHT_DECAY, 3)
    passes, metrics = run.named("forward_backward"), run.named("calculate_metric")
    assert len(passes) == len(metrics) == 3
    for call, metric in zip(passes, metrics, strict=True):
        rows = call.given["inputs"]
        with torch.no_grad():
            wanted, _ = _logits(teacher, rows)
        found, mask = _logits(plain.model, rows)
        loss = _distillation(found[mask], wanted[mask])
        assert call.result["loss"] == pytest.approx(loss.item(), abs=LOGPS)
        assert float(metric.result["loss"]) == pytest.approx(loss.item(), abs=1.5e-4)
        steps.take(loss)
    assert passes[0].result["loss"] > 0.05  # the teacher is another model
    plain.assert_saved(run.folder / "output" / final / ADAPTER, tolerance=WEIGHTS)
    assert "Training completed. Total steps: 3" in run.output


def _scored(run: LocalRun) -> list[Call]:
    """Return the teacher's calls: they generate nothing."""
    calls = [call for call in run.named("sample") if "max_tokens=0" in call.given["sampling_params"]]
    assert all(each["sequences"][0]["tokens"] == [] for call in calls for each in call.result)
    return calls


def _check_gkd_off_policy(run: LocalRun, model_folder: Path) -> None:
    assert len(_scored(run)) == len(run.named("sample")) == 3
    _check_distillation(run, model_folder, "gkd-final")
    assert (run.folder / "output/gkd-checkpoint-2" / ADAPTER).exists()


def _check_gkd_on_policy(run: LocalRun, model_folder: Path) -> None:
    scored = _scored(run)
    drawn = [call for call in run.named("sample") if call not in scored]
    assert len(scored) == len(drawn) == 3
    check_samples(LocalRun(run.folder, run.output, [call for call in run.calls if call not in scored]), model_folder)
    for sampled, call in zip(drawn, scored, strict=True):  # the teacher scores what the student has just sampled
        assert [each["new_input_feature"]["input_ids"] for each in sequences_of(sampled)] == [
            row["input_ids"] for row in call.given["inputs"]
        ]
    _check_distillation(run, model_folder, "gkd-on-policy-final")


MEGATRON_CHECKS: dict[str, Callable[[LocalRun, Path], None]] = {
    "dpo_lora": _check_dpo_lora,
    "dpo_full": _check_dpo_full,
    "dpo_multi_lora": _check_dpo_multi_lora,
    "gkd_off_policy": _check_gkd_off_policy,
    "gkd_on_policy": _check_gkd_on_policy,
    "grpo": check_grpo,
    "short_math_grpo": check_short_math_grpo,
    "short_math_grpo_multi_lora": _check_short_math_grpo_multi_lora,
}
