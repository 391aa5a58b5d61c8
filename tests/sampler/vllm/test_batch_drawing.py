"""Whole batches are drawn at once as each row would be alone. These tests need no vLLM."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from twinkle.sampler.noise import uniform
from twinkle.sampler.torch_sampler.drawing import Draw, Drawn, Penalties, collect, draw_tokens
from twinkle.sampler.vllm import batch_drawing
from twinkle.sampler.vllm.batch_drawing import BatchDrawing, DrawnBatch, DrawSettings

VOCAB = 600
SETTINGS = [
    DrawSettings(1.0, -1, 1.0, seed=1, sample=0, top=0),
    DrawSettings(1.0, -1, 1.0, seed=1, sample=1, top=0),
    DrawSettings(0.0, -1, 1.0, seed=2, sample=0, top=3),
    DrawSettings(0.7, 20, 0.9, seed=-5, sample=0, top=0),
    DrawSettings(1.5, -1, 0.8, seed=2**62, sample=2, top=5, min_p=0.01),
    DrawSettings(1.0, -1, 1.0, seed=3, sample=0, top=1, repetition_penalty=1.4, frequency_penalty=0.5),
]
PROMPT, GENERATED = np.array([4, 5, 6, 5]), [7, 7, 8]
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]


def logits_for(rows: int, device: str, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(device)


def alone(logits_V: torch.Tensor, settings: DrawSettings, position: int) -> Drawn:
    """Draw one row by itself, as the torch sampler does."""
    penalties = None
    if settings.penalises:
        penalties = Penalties(
            settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty, PROMPT, GENERATED
        )
    noise = uniform(settings.seed, settings.sample, position)
    draw = Draw(settings.temperature, settings.top_k, settings.top_p, noise, settings.top, settings.min_p, penalties)
    return collect([draw_tokens(logits_V[None].float(), [draw], VOCAB)])[0]


def draw(
    drawing: BatchDrawing, logits: torch.Tensor, settings: Sequence[DrawSettings], positions: Sequence[int]
) -> DrawnBatch:
    penalties = {row: each.penalties(PROMPT, GENERATED) for row, each in enumerate(settings) if each.penalises}
    drawing.set_rows(list(settings))
    assert drawing.penalised == list(penalties)
    return drawing.draw(logits, np.array(positions), penalties)


def assert_same(
    batch: DrawnBatch, logits: torch.Tensor, settings: Sequence[DrawSettings], places: Sequence[int]
) -> None:
    for row, (each, position) in enumerate(zip(settings, places, strict=True)):
        expected = alone(logits[row], each, position)
        assert batch.tokens[row] == expected.token
        assert batch.logprobs[row, 0].item() == pytest.approx(expected.logprob, abs=1e-5)
        if each.top:
            assert expected.top is not None
            np.testing.assert_array_equal(batch.ids[row, 1 : 1 + each.top].cpu(), expected.top.token_ids[0])
            found = batch.logprobs[row, 1 : 1 + each.top].cpu()
            np.testing.assert_allclose(found, expected.top.logprobs[0], atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_rows_are_drawn_as_if_alone(device: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the batch is drawn in parts, and whether or not the rows are those of the step before."""
    for name in ("_ELEMENTS", "_SORTED_ELEMENTS"):
        monkeypatch.setattr(batch_drawing, name, at_once * VOCAB)
    drawing = BatchDrawing()
    for step, rows in enumerate([SETTINGS, SETTINGS, SETTINGS[::-1], SETTINGS[1:3], SETTINGS[:1], SETTINGS]):
        logits = logits_for(len(rows), device, step)
        positions = [step + 3 * row for row in range(len(rows))]
        assert_same(draw(drawing, logits, rows, positions), logits, rows, positions)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_lower_precision(device: str) -> None:
    logits = logits_for(len(SETTINGS), device).bfloat16()
    positions = list(range(len(SETTINGS)))
    assert_same(draw(BatchDrawing(), logits, SETTINGS, positions), logits, SETTINGS, positions)


def test_logits_that_are_not_finite_fail_their_own_row() -> None:
    logits = logits_for(len(SETTINGS), "cpu")
    logits[1, 3] = torch.nan
    logits[4] = -torch.inf
    batch = draw(BatchDrawing(), logits, SETTINGS, [0] * len(SETTINGS))
    assert batch.logprobs[:, 0].isnan().tolist() == [row in (1, 4) for row in range(len(SETTINGS))]
    assert ((batch.tokens >= 0) & (batch.tokens < VOCAB)).all()


def test_settings_travel_with_a_request() -> None:
    for settings in SETTINGS:
        assert DrawSettings.from_extra_args(settings.to_extra_args()) == settings
    assert DrawSettings.from_extra_args(None) is None
    assert DrawSettings.from_extra_args({"other": [1.0]}) is None
