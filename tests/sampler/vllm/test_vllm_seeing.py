"""vLLM with images, beside the trainer. vLLM reads them where torchvision can be imported: on GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from tests.sampler.vllm.vllm_model import make_adapter, request, run
from tests.support.models.seeing_models import picture, png
from twinkle import hub
from twinkle.data_format import SamplingParams
from twinkle.model import LoraSpec, Trainer, TransformersModel
from twinkle.model.types import Image
from twinkle.sampler import LocalSampler, SampleRequest, TorchSampler, vLLMSampler

if TYPE_CHECKING:
    from twinkle.sampler.vllm import VllmSampler

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("torchvision") is None, reason="needs vLLM and torchvision"
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY, LARGE, LINEAR = "random://qwen3-vl-tiny", "random://qwen3-vl-8b", "random://qwen3.5-tiny"
# On a CPU, vLLM computes linear attention in bf16 only.
MODELS = [TINY, "random://qwen2.5-vl-tiny", *([LINEAR, LARGE] if DEVICE == "cuda" else [])]
# On a GPU, the share must be free when vLLM starts; it is not the size of the cache.
CACHE: dict[str, object] = {"kv_cache_memory_bytes": 2**26}
if DEVICE == "cuda":
    CACHE = {"kv_cache_memory_bytes": 2**31, "gpu_memory_utilization": 0.1}
MEMORY = 2**33 if DEVICE == "cuda" else 2**31  # bytes for the trainer of a tiny model
TOKENS = 12
BLOCK = 128  # tokens: what vLLM's prefix cache keeps is a multiple of 16 on a GPU, and of 128 on a CPU
# The largest mean difference of log-probabilities. In fp32 two programs add the same numbers in a different order; in
# bf16, in which vLLM computes LoRA on a GPU, two correct programs differ by about 0.05.
BOUND = 0.1 if DEVICE == "cuda" else 3e-5
DTYPE = "bf16" if DEVICE == "cuda" else "fp32"


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trainer(model: str) -> Trainer:
    large = model == LARGE
    memory, size = (30 * 2**30, 0.01) if large else (MEMORY, 0.05)
    trainer = Trainer.from_pretrained(model, device=DEVICE, dtype=DTYPE, memory_budget_bytes=memory)
    make_adapter(trainer, "a", LoraSpec(rank=8, seed=1), seed=1, size=size)
    return trainer


@pytest.fixture(scope="module")
def sampler(trainer: Trainer, model: str) -> "Iterator[VllmSampler]":
    """The engine; its start compares it with the trainer, also on a prompt with an image."""
    from twinkle.sampler.vllm import VllmSampler

    args: dict[str, object] = {"max_model_len": 512, "max_loras": 2, "max_num_seqs": 16}
    args |= CACHE | ({"gpu_memory_utilization": 0.3} if model == LARGE else {})
    args |= {"limit_mm_per_prompt": {"image": 3}}
    sampler = VllmSampler(trainer, hub.load_tokenizer(model), engine_args=args)
    sampler.publish("a", "a")
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def scorer(trainer: Trainer) -> TorchSampler:
    scorer = TorchSampler(trainer, None, max_sequences=8)
    scorer.publish("a", "a")
    return scorer


def asked(trainer: Trainer, name: str, version: str | None, seeds: Sequence[int], **more: object) -> SampleRequest:
    """Return a request for a prompt of text with pictures in it, which ``seeds`` draw."""
    assert trainer.vision is not None
    assert trainer.image_processing is not None
    tokens, images, pad = list(range(40, 60)), [], trainer.vision.image_token
    for number, seed in enumerate(seeds):
        file = png(picture(64 + 32 * number, 128, seed))
        size = trainer.image_processing.size(file)
        images.append(Image(len(tokens), size.rows, size.columns, f"{name} {seed}", file))
        tokens += [*[pad] * size.tokens, *range(70, 78)]
    tokens += [100 + number % 50 for number in range(BLOCK)]
    how = {"max_tokens": TOKENS, "seed": 7, "stop_tokens": (pad,), **more}
    return replace(request(name, version, np.array(tokens), 1, **how), images=images)


def differences(sampler: "VllmSampler", scorer: TorchSampler, requests: Sequence[SampleRequest]) -> dict[str, float]:
    """Sample, and return how far the reported log-probabilities are from the trainer's, on average."""
    drawn = {name: result.sequences[0] for name, result in run(sampler, requests).items()}
    scored = []
    for each in requests:
        tokens = np.concatenate([each.prompt, drawn[each.request_id].tokens])
        plain = request(each.request_id, each.version_id, tokens, max_tokens=1)
        scored.append(replace(plain, prompt_logprobs=True, images=each.images))
    scores = {name: result.prompt_logprobs for name, result in run(scorer, scored).items()}
    return {
        name: float(np.abs(sequence.logprobs - scores[name][-len(sequence.tokens) :]).mean())
        for name, sequence in drawn.items()
    }


def test_the_librarys_sampler_reads_conversations_with_pictures() -> None:
    """Its responses are those of LocalSampler, with the same seeds."""
    drawn = [Pillow.fromarray(picture(96, 64, seed)) for seed in (1, 2)]
    talks = [{"messages": [{"role": "user", "content": "<image>What is it?"}], "images": [each]} for each in drawn]
    params = SamplingParams(max_tokens=6, seed=3, logprobs=1, temperature=0.0)
    args = {"max_model_len": 512, "limit_mm_per_prompt": {"image": 1}, "enable_lora": False, **CACHE}
    own = vLLMSampler(TINY, args, dtype="fp32", memory_budget_bytes=MEMORY)
    try:
        own.reset_mm_cache()
        local = LocalSampler(TransformersModel(model_id=TINY, mixed_precision="fp32", device=DEVICE))
        for each in (own, local):
            each.set_template("Qwen3_5Template", model_id=TINY)
        ours, theirs = own.sample(talks, params), local.sample(talks, params)
        own.reset_encoder_cache()
        assert [each.prompt_token_ids for each in ours] == [each.prompt_token_ids for each in theirs]
        assert [each.sequences[0].tokens for each in ours] == [each.sequences[0].tokens for each in theirs]
        assert [each.sequences[0].tokens for each in own.sample(talks, params)] == [
            each.sequences[0].tokens for each in ours
        ]
    finally:
        own.shutdown()


def test_log_probabilities_are_the_trainers(sampler: "VllmSampler", scorer: TorchSampler, trainer: Trainer) -> None:
    """Without images, with one and with two, for the base model and with an adapter, all in one batch."""
    requests = [
        asked(trainer, f"{version}-{len(seeds)}", version, seeds)
        for version in (None, "a")
        for seeds in ((), (1,), (2, 3))
    ]
    found = differences(sampler, scorer, requests)
    assert max(found.values()) < BOUND, found
    if trainer.model_id != LINEAR:
        assert sampler._unapplied <= {"lm_head"}


def test_prompts_that_differ_in_their_picture_share_no_cache(
    sampler: "VllmSampler", scorer: TorchSampler, trainer: Trainer
) -> None:
    """The tokens of both prompts are equal, and their pictures are in the first block of the cache."""
    red, blue = (asked(trainer, name, "a", (seed,)) for name, seed in (("red", 11), ("blue", 12)))
    assert red.prompt.tolist() == blue.prompt.tolist()
    for one in (red, blue, red):
        found = differences(sampler, scorer, [one])
        assert max(found.values()) < BOUND, found
    again = run(sampler, [red])["red"].cached_prompt_tokens
    assert again < len(red.prompt)
    assert again or trainer.model_id == LINEAR  # vLLM may keep no prefixes of models with linear attention


def test_scores_of_a_prompt_with_a_picture(sampler: "VllmSampler", scorer: TorchSampler, trainer: Trainer) -> None:
    """One for each token after the first, also at the places of the image."""
    one = replace(asked(trainer, "scored", "a", (5,)), prompt_logprobs=True)
    ours, theirs = (run(each, [one])["scored"].prompt_logprobs for each in (sampler, scorer))
    assert np.isfinite(ours[1:]).all()
    assert np.abs(ours[1:] - theirs[1:]).mean() < BOUND


def test_a_sampler_that_forgets_images_computes_them_again(
    sampler: "VllmSampler", scorer: TorchSampler, trainer: Trainer
) -> None:
    one = asked(trainer, "again", None, (21, 22))
    for _ in range(2):
        found = differences(sampler, scorer, [one])
        assert max(found.values()) < BOUND, found
        sampler.reset_mm_cache()
        sampler.reset_encoder_cache()
        sampler.reset_prefix_cache()
    assert run(sampler, [one])["again"].cached_prompt_tokens == 0
