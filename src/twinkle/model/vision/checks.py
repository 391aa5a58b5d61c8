"""Checks the images of a sequence before they join a batch. Errors name the field and what is allowed there."""

from collections.abc import Sequence

import numpy as np

from twinkle.errors import InvalidInputError
from twinkle.images import EncodedImage, ResizedImage
from twinkle.model.types import Image, IntArray, VisionSpec


def check_images(
    images: Sequence[Image],
    tokens: IntArray,
    vision: VisionSpec | None,
    *,
    field: str,
    reader: str = "model",
) -> tuple[Image, ...]:
    """Check the images of a sequence: the tokens of all images are the model's image token.

    That token elsewhere is text, with its own embedding: a model may draw it, and what it drew must be good for
    training and for the next prompt. ``vision``: what the model wants of images; None: images are refused. ``reader``:
    who refuses them.
    """
    if not isinstance(images, Sequence) or not all(isinstance(image, Image) for image in images):
        raise InvalidInputError(field, images, "a sequence of Images")
    if vision is None:
        if images:
            why = " (so do vision models that are sharded or trained as a whole)" if reader == "model" else ""
            allowed = f"none: this {reader} reads text only{why}"
            raise InvalidInputError(field, f"{len(images)} images", allowed)
        return ()
    end = 0
    for number, image in enumerate(images):
        place = f"{field}[{number}]"
        _check_image(image, place, vision)
        if not end <= image.first <= len(tokens) - image.tokens:
            allowed = f"an index from {end} on that leaves room for {image.tokens} tokens, of {len(tokens)}"
            raise InvalidInputError(f"{place}.first", image.first, allowed)
        end = image.first + image.tokens
        if (tokens[image.first : end] != vision.image_token).any():
            raise InvalidInputError(
                f"{place}.first", image.first, f"the first of {image.tokens} tokens {vision.image_token} in a row"
            )
    return tuple(images)


def _check_image(image: Image, field: str, vision: VisionSpec) -> None:
    for name in ("first", "rows", "columns"):
        least, value = (0 if name == "first" else 1), getattr(image, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidInputError(f"{field}.{name}", value, f"an integer ≥ {least}")
    if not isinstance(image.digest, str) or not image.digest:
        raise InvalidInputError(f"{field}.digest", image.digest, "a string that names the image")
    if isinstance(image.pixels, EncodedImage | ResizedImage):
        return
    try:
        patches = np.asarray(image.pixels)
    except (TypeError, ValueError) as error:  # for example ragged lists
        raise InvalidInputError(f"{field}.pixels", image.pixels, "an image, or an array of numbers") from error
    shape = image.tokens * vision.merge**2, vision.patch_width
    if patches.dtype.kind != "f" or patches.shape != shape:
        given = f"{patches.dtype} of shape {patches.shape}"
        raise InvalidInputError(
            f"{field}.pixels", given, f"floats of shape {shape}, the patches of {image.tokens} tokens"
        )
    if not np.isfinite(patches).all():
        raise InvalidInputError(f"{field}.pixels", "NaN or infinity", "finite numbers")
