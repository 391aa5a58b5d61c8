"""The check that vLLM computes what the trainer computes.

vLLM continues a short probe prompt. The log-probabilities that it reports for the likeliest tokens at each step are
compared with the trainer's own for the same tokens. The mean difference must stay below a bound: 1e-3 in float32 and
0.25 in bfloat16 (where two correct programs differ by 0.1), plus a tenth of the adapter's effect, which is the mean
change of log-probabilities that the adapter makes. If vLLM ignores an adapter or part of it, the error is about as
large as the effect. An effect below the bound cannot be told from rounding noise; such an adapter relies on the check
at the start. A vision model also continues a prompt with an image, without an adapter, because vLLM computes the
features and the positions of images by itself.

At the start, each kind of module is tried by itself with made-up weights, so that the modules on which vLLM does not
apply LoRA are known by name. Their effect is large enough if it is three times the difference that the base model has
on the same prompt, which is rounding noise. vLLM applies them if its log-probabilities move along with the trainer's:
if the projection of vLLM's change on the trainer's change is more than half of the latter. Noise has no direction, so
this tells the two cases apart even where noise is as large as the effect (in a small model with experts, one token that
rounding sends to another expert is enough). Shapes: S steps, k likeliest tokens, T prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.lora.request import LoRARequest

from twinkle.images import ImageProcessing, ResizedImage
from twinkle.model.adapters.peft_config import peft_config
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.lora.stacks import Target
from twinkle.model.decoder.targets import short_names
from twinkle.model.types import FloatArray, Image, IntArray, LoraSpec, VisionSpec
from twinkle.sampler.types import SampleRequest, SampleResult, SamplingParams
from twinkle.sampler.vllm.batch_drawing import DrawSettings
from twinkle.sampler.vllm.engine import Engine
from twinkle.sampler.vllm.prompts import Prompt
from twinkle.sampler.vllm.requests import engine_params
from twinkle.sampler.vllm.versions import EXPERTS, AdapterWeights

_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
_OF_CHANGE = 0.1
# What two correct programs may differ by even where the base model happens to be equal.
_LEAST_NOISE = {torch.float32: 1e-4, torch.bfloat16: 0.01}
_CLEAR = 3
_PROBE, _TOP = 8, 8
_STEPS = 2  # tokens that vLLM continues a prompt by
_STEPS_OF_TRIALS = 8  # the same where made-up weights are tried, because more values average noise out
_PICTURE, _SQUARE = (96, 160), 10  # pixels: height and width of a picture, and the sides of squares in it
_RANK = 8
# Sizes of made-up weights: the first one whose effect is large enough to measure is used.
_SIZES = (0.05, 0.15, 0.45, 1.35)

Score = Callable[[SampleRequest], SampleResult]


@dataclass(frozen=True)
class Difference:
    """Mean absolute differences of log-probabilities.

    ``error``: between vLLM and the trainer. ``change``: between the adapter and the base model, in the trainer.
    ``share``: how much of that change vLLM shows, 1 if all of it and 0 if none. ``noise``: between vLLM and the trainer
    for the base model.
    """

    error: float
    change: float
    share: float
    bound: float
    noise: float

    @property
    def is_small(self) -> bool:
        return self.error <= self.bound + _OF_CHANGE * self.change

    @property
    def shows(self) -> bool:
        """Return whether the adapter's effect is large enough to tell whether vLLM applies it."""
        return self.change > _CLEAR * self.noise

    @property
    def is_applied(self) -> bool:
        """Return whether vLLM applies the adapter; valid only if :attr:`shows`."""
        return self.share > 0.5

    def __str__(self) -> str:
        return f"mean difference of log-probabilities {self.error:.3g} where the adapter changes {self.change:.3g}"


class SelfCheck:
    """Compares vLLM with the trainer. ``score`` computes prompt scores with the trainer's model.

    ``probes``: the prompts that vLLM continues. Adapters are compared on the first one.
    """

    def __init__(
        self, engine: Engine, score: Score, probes: Sequence[Prompt], vocab_size: int, dtype: torch.dtype
    ) -> None:
        self._engine = engine
        self._score = score
        self._probes = probes
        self._bound, self._noise = _BOUNDS[dtype], _LEAST_NOISE[dtype]
        self._top = min(_TOP, vocab_size)

    def compare_base(self) -> list[Difference]:
        """Compare the base model, on each probe."""
        found = [self._compare(each, None, None) for each in self._probes]
        self._noise = max(self._noise, found[0].error)  # adapters are compared on this prompt
        return found

    def compare(self, lora: LoRARequest, version_id: str, *, trial: bool = False) -> Difference:
        """Compare vLLM's ``lora`` with the trainer's version.

        trial: measure the adapter's effect even if the error alone is small enough, and with more tokens.
        """
        return self._compare(self._probes[0], lora, version_id, trial=trial)

    def _compare(
        self, start: Prompt, lora: LoRARequest | None, version_id: str | None, *, trial: bool = False
    ) -> Difference:
        tokens_S, ids_Sk, found_Sk = self._continued(start, lora, _STEPS_OF_TRIALS if trial else _STEPS)
        expected_Sk = self._expected(start, version_id, tokens_S, ids_Sk)
        error = _mean(found_Sk - expected_Sk)
        if version_id is None or (error <= self._bound and not trial):
            return Difference(error, 0.0, 1.0, self._bound, self._noise)
        base_Sk = self._expected(start, None, tokens_S, ids_Sk)
        change_Sk = expected_Sk - base_Sk
        share = float(((found_Sk - base_Sk) * change_Sk).sum() / np.square(change_Sk).sum().clip(1e-30))
        return Difference(error, _mean(change_Sk), share, self._bound, self._noise)

    def _continued(self, start: Prompt, lora: LoRARequest | None, steps: int) -> tuple[IntArray, IntArray, FloatArray]:
        draw = DrawSettings(temperature=1.0, top_k=-1, top_p=1.0, seed=0, sample=0, top=self._top)
        params = engine_params(draw, steps, frozenset(), watched=False)
        piece = self._engine.generate(start, params, lora)
        if np.isnan(piece.logprobs).any():
            return np.zeros(steps, np.int64), np.zeros((steps, 1), np.int64), np.full((steps, 1), np.nan, np.float32)
        assert piece.tops is not None, "they were asked for"
        return piece.tokens, piece.tops.token_ids, piece.tops.logprobs

    def _expected(self, start: Prompt, version_id: str | None, tokens_S: IntArray, ids_Sk: IntArray) -> FloatArray:
        prompt_T = np.concatenate([start.tokens, tokens_S])
        wanted = np.full((len(prompt_T) - 1, ids_Sk.shape[1]), -1, np.int64)
        wanted[-len(tokens_S) :] = ids_Sk
        params = SamplingParams(max_tokens=1, seed=0)
        request = SampleRequest(
            "self-check", version_id, prompt_T, params, target_prompt_logprobs=wanted, images=start.images
        )
        scores = self._score(request).target_prompt_logprobs
        assert scores is not None, "they were asked for"
        return scores[-len(tokens_S) :]


def probe(vocab_size: int) -> Prompt:
    """Return a short prompt of text."""
    return Prompt((np.arange(_PROBE) * 7919 + 13) % vocab_size)


def probe_with_image(processing: ImageProcessing, vision: VisionSpec, vocab_size: int) -> Prompt:
    """Return the prompt of text with an image in its middle that is wider than high, as its positions should show."""
    text = probe(vocab_size).tokens
    text[text == vision.image_token] = (vision.image_token + 1) % vocab_size
    size = processing.size_of(*_PICTURE)
    rows, columns = processing.pixels_of(size)
    # Squares of all three colours, none of which is like its neighbours.
    squares_HW3 = np.random.default_rng(0).integers(0, 256, (rows // _SQUARE + 1, columns // _SQUARE + 1, 3), np.uint8)
    rgb_HW3 = squares_HW3.repeat(_SQUARE, 0).repeat(_SQUARE, 1)[:rows, :columns]
    first = _PROBE // 2
    tokens = np.insert(text, first, np.full(size.tokens, vision.image_token))
    return Prompt(tokens, [Image(first, size.rows, size.columns, "self-check", ResizedImage(rgb_HW3))])


def made_up_adapters(architecture: Architecture, kind: str) -> Iterator[AdapterWeights]:
    """Yield adapters on the modules called ``kind``, with growing weights."""
    targets = tuple(each for each in _tried(architecture) if _kind(each) == kind)
    for size in _SIZES:
        yield _made_up(targets, architecture, size)


def kinds(architecture: Architecture) -> list[str]:
    """Return the names of the modules that adapters may be on; all projections of experts are one."""
    return sorted({_kind(target) for target in _tried(architecture)})


def _tried(architecture: Architecture) -> tuple[Target, ...]:
    return (*architecture.linear, *architecture.shared_outer, architecture.head)


def _kind(target: Target) -> str:
    return target.name.rpartition(".")[2] if target.copies is None else EXPERTS


def _made_up(targets: tuple[Target, ...], architecture: Architecture, size: float) -> AdapterWeights:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for target in targets:
        name = f"base_model.model.{target.name}"
        scale = target.in_features**-0.5
        a, b = (*target.experts_of_a, _RANK, target.in_features), (*target.experts_of_b, target.out_features, _RANK)
        tensors[f"{name}.lora_A.weight"] = torch.randn(*a, generator=generator) * scale
        tensors[f"{name}.lora_B.weight"] = torch.randn(*b, generator=generator) * size
    config = peft_config(LoraSpec(rank=_RANK), short_names(targets, architecture), "")
    return AdapterWeights(config, tensors)


def _mean(differences: FloatArray) -> float:
    """Return the mean absolute difference, or infinity if it is NaN, so that every bound refuses it."""
    mean = float(np.abs(differences).mean())
    return mean if np.isfinite(mean) else float("inf")
