"""The check at the start can tell whether vLLM applies an adapter, where rounding is as large as the adapter's effect.

Engine and trainer are tables of log-probabilities here, so that effect and noise are known.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from twinkle.sampler import SampleRequest

pytestmark = pytest.mark.vllm

VOCABULARY = 50
CONTEXT = 24


class Tables:
    """The log-probabilities of a base model and of an adapter, by position, and an engine that adds noise to them."""

    def __init__(self, effect: float, noise: float, *, applied: bool, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._noise, self._applied = noise, applied
        self._base = self._random.normal(-4.0, 1.0, (CONTEXT, VOCABULARY))
        self._adapted = self._base + effect * self._random.normal(size=self._base.shape)

    def generate(self, start: Any, params: Any, lora: object | None) -> SimpleNamespace:
        true = self._adapted if lora is not None and self._applied else self._base
        first, steps = len(start.tokens) - 1, params.max_tokens
        found = true[first : first + steps]
        found = found + self._noise * self._random.normal(size=found.shape)
        ids = np.argsort(-found, axis=1)[:, :8]
        tops = SimpleNamespace(token_ids=ids, logprobs=np.take_along_axis(found, ids, 1))
        return SimpleNamespace(tokens=ids[:, 0], logprobs=tops.logprobs[:, 0], tops=tops)

    def score(self, request: SampleRequest) -> SimpleNamespace:
        true = self._base if request.version_id is None else self._adapted
        wanted = request.target_prompt_logprobs
        scores = np.take_along_axis(true[: len(wanted)], np.maximum(wanted, 0), 1)
        return SimpleNamespace(target_prompt_logprobs=scores)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("noise_over_effect", [0.05, 0.2])
def test_noise_does_not_hide_whether_an_adapter_is_applied(applied: bool, noise_over_effect: float) -> None:
    from twinkle.sampler.vllm.self_check import SelfCheck, probe

    for seed in range(50):
        tables: Any = Tables(0.5, 0.5 * noise_over_effect, applied=applied, seed=seed)
        check = SelfCheck(tables, tables.score, [probe(VOCABULARY)], VOCABULARY, torch.bfloat16)
        assert all(each.is_small for each in check.compare_base())
        lora: Any = object()
        found = check.compare(lora, "adapter", trial=True)
        assert found.shows
        assert found.is_applied is applied
        assert found.change == pytest.approx(0.4, rel=0.6)  # the mean of |0.5 z|


def test_an_effect_within_the_noise_does_not_show() -> None:
    from twinkle.sampler.vllm.self_check import SelfCheck, probe

    tables: Any = Tables(0.1, 0.1, applied=True, seed=0)
    check = SelfCheck(tables, tables.score, [probe(VOCABULARY)], VOCABULARY, torch.bfloat16)
    check.compare_base()
    lora: Any = object()
    assert not check.compare(lora, "adapter", trial=True).shows
