"""Numbers arrive unchanged through a softmax and a top-k selection. Needs no vLLM."""

import math

import numpy as np
import pytest
import torch

from twinkle.sampler.torch_sampler.drawing import Draw, collect, draw_tokens
from twinkle.sampler.vllm import message

VOCAB = 40


def through_vllm(row: torch.Tensor, top: int) -> tuple[int, dict[int, float]]:
    """Return what vLLM reports of a position: the likeliest token, and log-probabilities of several likely ones."""
    reported = row.log_softmax(0).topk(min(top + message.OVERHEAD, len(row)))
    pairs = zip(reported.indices.tolist(), reported.values.tolist(), strict=True)
    return int(row.argmax()), {token: value for token, value in pairs if value > -math.inf}


@pytest.mark.parametrize("top", [0, 1, 5, VOCAB - 2])
def test_tokens_and_numbers_arrive(top: int) -> None:
    generator = torch.Generator().manual_seed(top)
    logits = torch.randn(64, VOCAB, generator=generator) * 4
    draws = [
        Draw(temperature, -1, 1.0, (row + 0.5) / 64, top) for row, temperature in enumerate([0.0, 0.5, 1.0, 3.0] * 16)
    ]
    expected = collect([draw_tokens(logits, draws, VOCAB)])
    message.write(draw_tokens(logits.clone(), draws, VOCAB), logits)
    for row, drawn in zip(logits, expected, strict=True):
        told = message.read(*through_vllm(row, top), top)
        assert told.finite
        assert told.token == drawn.token
        assert told.logprob == pytest.approx(drawn.logprob, abs=1e-5)
        if top:
            ids, values = np.array(told.top).T
            np.testing.assert_allclose(values, drawn.top.logprobs[0], atol=1e-5)
            assert set(ids) == set(drawn.top.token_ids[0]) or len(set(drawn.top.logprobs[0])) < top


def test_what_is_not_finite_is_told() -> None:
    logits = torch.randn(2, VOCAB)
    logits[0, 3] = math.nan
    draws = [Draw(1.0, -1, 1.0, 0.5, 2)] * 2
    message.write(draw_tokens(logits.clone(), draws, VOCAB), logits)
    assert not message.read(*through_vllm(logits[0], 2), 2).finite
    assert message.read(*through_vllm(logits[1], 2), 2).finite
