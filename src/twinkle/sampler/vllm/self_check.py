"""The check that vLLM computes what the trainer computes.

vLLM continues a short probe prompt. The log-probabilities that it reports for the likeliest tokens at each step are
compared with the trainer's own for the same tokens. The mean difference must stay below a bound: 1e-3 in float32 and
0.25 in bfloat16 (where two correct programs differ by 0.1), plus a tenth of the adapter's effect, which is the mean
change of log-probabilities that the adapter makes. If vLLM ignores an adapter or part of it, the error is about as
large as the effect. An effect below the bound cannot be told from rounding noise; such an adapter relies on the check
at the start.

At the start, each kind of module is tried by itself with made-up weights, so that the modules on which vLLM does not
apply LoRA are known by name. Shapes: S steps, k likeliest tokens, T prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from vllm.lora.request import LoRARequest

from twinkle.model.adapters.peft_config import peft_config
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.lora.stacks import Target
from twinkle.model.decoder.targets import short_names
from twinkle.model.types import FloatArray, IntArray, LoraSpec
from twinkle.sampler.types import SampleRequest, SampleResult, SamplingParams
from twinkle.sampler.vllm.batch_drawing import DrawSettings
from twinkle.sampler.vllm.engine import Engine
from twinkle.sampler.vllm.requests import engine_params
from twinkle.sampler.vllm.versions import AdapterWeights

_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
_OF_CHANGE = 0.1
_PROBE, _STEPS, _TOP = 8, 2, 8
_RANK = 8
# Sizes of made-up weights: the first one whose effect is large enough to measure is used.
_SIZES = (0.05, 0.15, 0.45, 1.35)

Score = Callable[[SampleRequest], SampleResult]


@dataclass(frozen=True)
class Difference:
    """Mean absolute differences of log-probabilities.

    ``error``: between vLLM and the trainer. ``change``: between the adapter and the base model, in the trainer.
    """

    error: float
    change: float
    bound: float

    @property
    def is_small(self) -> bool:
        return self.error <= self.bound + _OF_CHANGE * self.change

    @property
    def shows(self) -> bool:
        """Return whether the adapter's effect is large enough to tell whether vLLM applies it."""
        return self.change > 3 * self.bound

    @property
    def is_applied(self) -> bool:
        """Return whether vLLM applies the adapter; valid only if :attr:`shows`.

        Made-up weights may magnify rounding noise, but not to half of their effect.
        """
        return self.error < self.change / 2

    def __str__(self) -> str:
        return f"mean difference of log-probabilities {self.error:.3g} where the adapter changes {self.change:.3g}"


class SelfCheck:
    """Compares vLLM with the trainer. ``score`` computes prompt scores with the trainer's model."""

    def __init__(self, engine: Engine, score: Score, vocab_size: int, dtype: torch.dtype) -> None:
        self._engine = engine
        self._score = score
        self._bound = _BOUNDS[dtype]
        self._top = min(_TOP, vocab_size)
        self._probe = (np.arange(_PROBE) * 7919 + 13) % vocab_size

    def compare(self, lora: LoRARequest | None, version_id: str | None, *, change: bool = False) -> Difference:
        """Compare vLLM's ``lora`` with the trainer's version (None: the base model).

        change: measure the adapter's effect even if the error alone is small enough.
        """
        tokens_S, ids_Sk, found_Sk = self._continued(lora)
        expected_Sk = self._expected(version_id, tokens_S, ids_Sk)
        error = _mean(found_Sk - expected_Sk)
        if version_id is None or (error <= self._bound and not change):
            return Difference(error, 0.0, self._bound)
        base_Sk = self._expected(None, tokens_S, ids_Sk)
        return Difference(error, _mean(expected_Sk - base_Sk), self._bound)

    def _continued(self, lora: LoRARequest | None) -> tuple[IntArray, IntArray, FloatArray]:
        draw = DrawSettings(temperature=1.0, top_k=-1, top_p=1.0, seed=0, sample=0, top=self._top)
        params = engine_params(draw, _STEPS, frozenset(), watched=False)
        piece = self._engine.generate(self._probe.tolist(), params, lora)
        if np.isnan(piece.logprobs).any():
            return np.zeros(_STEPS, np.int64), np.zeros((_STEPS, 1), np.int64), np.full((_STEPS, 1), np.nan, np.float32)
        assert piece.tops is not None, "they were asked for"
        return piece.tokens, piece.tops.token_ids, piece.tops.logprobs

    def _expected(self, version_id: str | None, tokens_S: IntArray, ids_Sk: IntArray) -> FloatArray:
        prompt_T = np.concatenate([self._probe, tokens_S])
        wanted = np.full((len(prompt_T) - 1, ids_Sk.shape[1]), -1, np.int64)
        wanted[-_STEPS:] = ids_Sk
        params = SamplingParams(max_tokens=1, seed=0)
        request = SampleRequest("self-check", version_id, prompt_T, params, target_prompt_logprobs=wanted)
        scores = self._score(request).target_prompt_logprobs
        assert scores is not None, "they were asked for"
        return scores[-_STEPS:]


def made_up_adapters(architecture: Architecture, kind: str) -> Iterator[AdapterWeights]:
    """Yield adapters on the modules called ``kind``, with growing weights."""
    targets = tuple(each for each in (*architecture.linear, architecture.head) if _kind(each) == kind)
    for size in _SIZES:
        yield _made_up(targets, architecture, size)


def kinds(architecture: Architecture) -> list[str]:
    return sorted({_kind(target) for target in (*architecture.linear, architecture.head)})


def _kind(target: Target) -> str:
    return target.name.rpartition(".")[2]


def _made_up(targets: tuple[Target, ...], architecture: Architecture, size: float) -> AdapterWeights:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for target in targets:
        name = f"base_model.model.{target.name}"
        scale = target.in_features**-0.5
        tensors[f"{name}.lora_A.weight"] = torch.randn(_RANK, target.in_features, generator=generator) * scale
        tensors[f"{name}.lora_B.weight"] = torch.randn(target.out_features, _RANK, generator=generator) * size
    config = peft_config(LoraSpec(rank=_RANK), short_names(targets, architecture), "")
    return AdapterWeights(config, tensors)


def _mean(differences: FloatArray) -> float:
    """Return the mean absolute difference, or infinity if it is NaN, so that every bound refuses it."""
    mean = float(np.abs(differences).mean())
    return mean if np.isfinite(mean) else float("inf")
