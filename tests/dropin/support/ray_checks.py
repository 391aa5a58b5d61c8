"""Checks of the scripts for Ray: their losses and weights are those of PEFT, Transformers and the plain formulas."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.dropin.support.local_runs import RATE, LocalRun
from tests.dropin.support.plain_models import (
    ADAPTER,
    FULL,
    PlainAdapter,
    PlainModel,
    Steps,
    base_model,
    batch_logps,
    dpo,
)
from tests.dropin.support.plain_rows import Rows, batches, encoded
from tests.dropin.support.ray_runs import FULL_RATE
from tests.dropin.support.rollout_checks import ROLLOUT_CHECKS
from twinkle.preprocessor import EmojiDPOProcessor


def _pairs(model_folder: Path) -> list[Rows]:
    """Return the rows of three batches: the chosen and the rejected row of each pair."""
    name, processor = "hjh0119/shareAI-Llama3-DPO-zh-en-emoji", EmojiDPOProcessor("You are a helpful assistant.")
    pairs = encoded(model_folder, name, processor, template="Template")
    return [[pair[side] for pair in batch for side in ("positive", "negative")] for batch in batches(pairs, 12, 4)]


def check_dpo(run: LocalRun, model_folder: Path, plain: PlainModel, steps: Steps, workers: int) -> None:
    """Train ``plain`` on the same pairs. The SFT part of a loss is a mean over the tokens of a data rank's own rows."""
    base = base_model(model_folder)
    metrics = [call.result for call in run.named("calculate_metric")]
    for rows, metric in zip(_pairs(model_folder), metrics, strict=True):
        with torch.no_grad():
            references = batch_logps(base, rows)
        now, size = plain.row_logps(rows), len(rows) // workers
        places = [slice(start, start + size) for start in range(0, len(rows), size)]
        parts = [dpo(now[place], references[place], beta=0.1, sft_weight=1.0) for place in places]
        loss, margin = (torch.stack(each).mean() for each in zip(*parts, strict=True))
        assert float(metric["loss"]) == pytest.approx(float(loss), abs=1.5e-4)
        assert float(metric["rewards/margins"]) == pytest.approx(float(margin), abs=1.5e-4)
        steps.take(loss)
    assert float(metrics[-1]["rewards/margins"]) > 0
    assert "Training completed. Total steps: 3" in run.output


def _check_dpo_lora(run: LocalRun, model_folder: Path) -> None:
    plain = PlainAdapter(model_folder, run.folder / "initial")
    check_dpo(run, model_folder, plain, Steps(plain, RATE, 0.0, 3, last=RATE * 0.1), workers=2)
    plain.assert_saved(run.folder / "output/dpo-lora-final-checkpoint" / ADAPTER)
    assert (run.folder / "output/dpo-lora-checkpoint-2" / ADAPTER).exists()


def _check_dpo_full(run: LocalRun, model_folder: Path) -> None:
    plain = PlainModel(model_folder)
    check_dpo(run, model_folder, plain, Steps(plain, FULL_RATE, 0.0, 3, last=FULL_RATE * 0.1), workers=1)
    plain.assert_saved(run.folder / "output/dpo-full-final-checkpoint" / FULL)
    assert base_model(run.folder / "output/dpo-full-checkpoint-2").num_parameters() == plain.model.num_parameters()
    for call in run.named("forward_backward"):  # the reference's outputs went from worker to worker
        assert re.fullmatch(r"<result of '.*'\.forward_only: not collected yet>", call.given["ref_outputs"])


CHECKS: dict[str, Callable[[LocalRun, Path], None]] = {
    "dpo_lora": _check_dpo_lora,
    "dpo_full": _check_dpo_full,
    **ROLLOUT_CHECKS,
}
