"""Images on their way to vLLM: what it gets, what is refused, and what is said where it cannot read them at all."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.support.models.seeing_models import image_processor, picture, png
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.images import ImageProcessing, ResizedImage
from twinkle.model import Trainer
from twinkle.model.types import Image, VisionSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` does that"),
]

PAD = 99
PROCESSING = ImageProcessing(image_processor())
VISION = VisionSpec(image_token=PAD, patch_width=1536, merge=2)
FILES = [png(picture(64, 96)), png(picture(32, 64, 1))]  # 2 × 3 and 1 × 2 tokens
TOKENS = np.array([5, *[PAD] * 6, 6, 7, *[PAD] * 2, 8])
IMAGES = (Image(1, 2, 3, "first", FILES[0]), Image(9, 1, 2, "second", FILES[1]))


def test_vllm_gets_one_token_and_one_picture_an_image() -> None:
    from twinkle.sampler.vllm.prompts import Pictures, Prompt

    seen = Pictures(PROCESSING, VISION, most=2).resized(TOKENS, IMAGES)
    prompt = Prompt(TOKENS, seen, "scope").for_vllm()
    assert prompt["prompt_token_ids"] == [5, PAD, 6, 7, PAD, 8]
    assert prompt["cache_salt"] == "scope"
    assert prompt["multi_modal_uuids"] == {"image": ["first-2x3", "second-1x2"]}
    for drawn, file in zip(prompt["multi_modal_data"]["image"], FILES, strict=True):
        np.testing.assert_array_equal(np.asarray(drawn), PROCESSING.resized(file).rgb_HW3)
    text = Prompt(TOKENS[:1]).for_vllm()
    assert dict(text) == {"prompt_token_ids": [5]}


def test_patches_become_the_picture_that_they_were_made_of() -> None:
    from twinkle.sampler.vllm.prompts import Pictures

    pictures = Pictures(PROCESSING, VISION, most=2)
    patches, size = PROCESSING.patches(FILES[0])
    (seen,) = pictures.resized(TOKENS[:7], [Image(1, size.rows, size.columns, "first", patches)])
    assert isinstance(seen.pixels, ResizedImage)
    np.testing.assert_array_equal(seen.pixels.rgb_HW3, PROCESSING.resized(FILES[0]).rgb_HW3)
    with pytest.raises(InvalidInputError, match=r"images\[0\].pixels: .*patches of no picture"):
        pictures.resized(TOKENS[:7], [Image(1, size.rows, size.columns, "first", 3 * patches)])


def test_images_that_vllm_cannot_take() -> None:
    from twinkle.sampler.vllm.prompts import Pictures

    pictures = Pictures(PROCESSING, VISION, most=2)
    with pytest.raises(InvalidInputError, match=r"images: got '3 images', allowed: at most 2.*limit_mm_per_prompt"):
        pictures.resized(TOKENS, [*IMAGES, IMAGES[0]])
    stray = np.array([PAD, *TOKENS])
    moved = [Image(each.first + 1, each.rows, each.columns, each.digest, each.pixels) for each in IMAGES]
    with pytest.raises(InvalidInputError, match=r"prompt\[0\]: got 99, .*vLLM takes it for the image"):
        pictures.resized(stray, moved)
    assert pictures.resized(np.array([*TOKENS, PAD]), IMAGES)  # behind the last image it is text
    with pytest.raises(InvalidInputError, match=r"images\[0\]: got '3 × 2 tokens', allowed: 2 × 3, its size"):
        pictures.resized(TOKENS, [Image(1, 3, 2, "first", FILES[0])])


def test_engine_args_of_vision_models() -> None:
    from twinkle.sampler.vllm.engine_args import check_engine_args, make_engine_args

    def made(given: dict[str, object], **about: bool) -> object:
        return make_engine_args(given, "folder", torch.device("cpu"), torch.float32, **about)

    check_engine_args({"enable_tower_connector_lora": False})
    with pytest.raises(InvalidInputError, match=r"enable_tower_connector_lora: .*adapters do not change the vision"):
        check_engine_args({"enable_tower_connector_lora": True})
    given = {"limit_mm_per_prompt": {"image": 3}, "mm_processor_kwargs": {"use_fast": True}}
    args = made(given, tower=True, images=True)
    assert (args.limit_mm_per_prompt, args.mm_processor_kwargs) == ({"image": 3, "video": 0}, {"use_fast": True})
    assert not args.skip_tokenizer_init
    assert made({}, tower=True).limit_mm_per_prompt == {"image": 0, "video": 0}
    assert made({}).skip_tokenizer_init
    for name, value in given.items():
        with pytest.raises(InvalidInputError, match=f"engine_args.{name}: .*reads text only"):
            made({name: value})
    for limits, about in (({"video": 1}, {"images": True}), ({"image": 1}, {"images": False})):
        with pytest.raises(InvalidInputError, match=r"engine_args.limit_mm_per_prompt.*: got 1, allowed: 0: "):
            made({"limit_mm_per_prompt": limits}, tower=True, **about)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_without_torchvision_it_says_what_is_missing() -> None:
    """As on CPUs: the torchvision of the public index was not made for the torch that vLLM has there."""
    from twinkle.sampler.vllm import VllmSampler

    trainer = Trainer.from_pretrained("random://qwen3-vl-tiny", device="cpu", dtype="fp32", memory_budget_bytes=2**30)
    with pytest.raises(UnsupportedError, match=r"vLLM needs torchvision for qwen3_vl, .*or use sampler_type torch"):
        VllmSampler(trainer, None, engine_args={"kv_cache_memory_bytes": 2**26})
