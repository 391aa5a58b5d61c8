"""Images and datums with images for a server whose tiny model sees: as the SDK sends them, and for a Trainer."""

import io
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from PIL import Image as Pillow
from tinker import types

from tests.support.models.seeing_models import picture
from tests.support.servers.exposition import scrape, value
from twinkle import hub
from twinkle.images import EncodedImage, ImageProcessing
from twinkle.model import Datum, Trainer
from twinkle.model.types import Image

SEES = "random://qwen2.5-vl-tiny"
Part = list[int] | EncodedImage  # tokens of text, or an image


def png(height: int, width: int, seed: int = 0) -> EncodedImage:
    return _file(height, width, seed, "png")


def jpeg(height: int, width: int, seed: int = 0) -> EncodedImage:
    return _file(height, width, seed, "jpeg")


def _file(height: int, width: int, seed: int, format: str) -> EncodedImage:
    written = io.BytesIO()
    Pillow.fromarray(picture(height, width, seed)).save(written, format.upper())
    return EncodedImage(written.getvalue(), format)


@cache
def trainer() -> Trainer:
    """The same model in this process."""
    torch.set_num_threads(1)
    return Trainer.from_pretrained(SEES, device="cpu", dtype="fp32")


@cache
def processing() -> ImageProcessing:
    made = ImageProcessing.from_folder(hub.resolve(SEES).path)
    assert made is not None
    return made


def chunk(image: EncodedImage, **changes: object) -> types.ImageChunk:
    fields = {"data": image.data, "format": image.format, "expected_tokens": processing().size(image).tokens}
    return types.ImageChunk(**{**fields, **changes})


def model_input(parts: Sequence[Part]) -> types.ModelInput:
    return types.ModelInput(
        chunks=[
            chunk(part) if isinstance(part, EncodedImage) else types.EncodedTextChunk(tokens=part) for part in parts
        ]
    )


def tokens_of(parts: Sequence[Part]) -> np.ndarray:
    """Return the tokens as the model reads them: with its image token for every token of an image."""
    vision = trainer().vision
    assert vision is not None
    pads = [
        [vision.image_token] * processing().size(part).tokens if isinstance(part, EncodedImage) else part
        for part in parts
    ]
    return np.array([token for part in pads for token in part])


def targets_of(parts: Sequence[Part], seed: int) -> tuple[list[int], list[float]]:
    """Return random targets and weights; those of images are 0, as renderers have it."""
    tokens, generator = tokens_of(parts), np.random.default_rng(seed)
    text = tokens != trainer().vision.image_token  # type: ignore[union-attr]
    targets, weights = generator.integers(3, 250, len(tokens)) * text, generator.random(len(tokens)) * text
    return targets.tolist(), weights.astype(np.float32).tolist()


def sdk_datum(parts: Sequence[Part], seed: int = 0) -> types.Datum:
    targets, weights = targets_of(parts, seed)
    return types.Datum(model_input=model_input(parts), loss_fn_inputs={"target_tokens": targets, "weights": weights})


def plain_datum(parts: Sequence[Part], seed: int = 0) -> Datum:
    """Return the same datum in the form that a Trainer takes."""
    targets, weights = targets_of(parts, seed)
    images, place = [], 0
    for part in parts:
        if isinstance(part, EncodedImage):
            patches, size = processing().patches(part)
            images.append(Image(place, size.rows, size.columns, str(hash(part.data)), patches))
        place += size.tokens if isinstance(part, EncodedImage) else len(part)
    return Datum(tokens_of(parts), np.array(targets), np.array(weights, np.float32), images=images)


def computed_and_reused(url: str) -> tuple[float, float]:
    """Return how many images the vision tower has seen, and how many were known."""
    said = scrape(url)
    computed, reused = (value(said, "twinkle_images_total", features=each) for each in ("computed", "reused"))
    return computed, reused
