"""Finds the places of images among the tokens of a request, and decodes them, for one base model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from twinkle.errors import InvalidInputError, LimitExceededError
from twinkle.images import EncodedImage, ImageLimits, ImageProcessing, ResizedImage, SentImage, SentImages, SentPatches
from twinkle.images.decoding import read_size
from twinkle.model.types import Image, IntArray, VisionSpec
from twinkle.model.vision.patches import RowPatches, owner_digest, place_patches

_LARGEST = ImageLimits()  # what was accepted is within the limits of its tenant


class SeesImages(Protocol):
    """A trainer in this process that keeps the features of images. Both methods are called in any thread."""

    def wants_pixels(self, image: Image) -> bool:
        """Return whether the next pass with an image would have to decode its file."""

    def image_counts(self) -> tuple[int, int]:
        """Return how many images the vision tower has seen, and how many were known."""


@dataclass(frozen=True)
class Placed:
    """A sequence with its images: ``tokens`` has the model's image token at their places.

    ``pixels``: how many the images' files have.
    """

    tokens: IntArray
    images: tuple[Image, ...]
    pixels: int


class ImageReader:
    """Reads the images of requests for one base model. Used in several threads at once."""

    def __init__(
        self,
        model: str,
        vision: VisionSpec,
        processing: ImageProcessing | None,
        trainer: SeesImages | None,
    ) -> None:
        """``processing``: the model's image processor; None: it has none, and images must come as patches.

        ``trainer``: None if it is in another process, which decodes files itself, and then only once.
        """
        self._model = model
        self._vision = vision
        self._processing = processing
        self._trainer = trainer

    @property
    def merge(self) -> int:
        """Return how many patches there are on a side of a token."""
        return self._vision.merge

    def counts(self) -> tuple[int, int] | None:
        """Return how many images the vision tower has seen, and how many were known; None if it is elsewhere."""
        return None if self._trainer is None else self._trainer.image_counts()

    def place(self, tokens: IntArray, sent: SentImages, tenant_id: str, limits: ImageLimits, room: int) -> Placed:
        """Return a sequence with its images. Only their headers are read.

        ``room``: the most tokens that the images may have. Digests depend on the tenant, so that no tenant can find out
        whether another one has sent the same image.
        """
        if sent.patches is not None:
            return self._with_patches(tokens, sent, sent.patches, tenant_id)
        if sent.beside:
            before = len(tokens)
            tokens, sent = self._between(tokens, sent, limits)
            room += before - len(tokens)
        cuts = [0, *(image.before for image in sent.files), len(tokens)]
        texts = [tokens[start:end] for start, end in pairwise(cuts)]
        parts, images, pixels, length = [texts[0]], [], 0, len(texts[0])
        for file, following in zip(sent.files, texts[1:], strict=True):
            image, stored = self._place_file(file, length, tenant_id, limits)
            length += image.tokens + len(following)
            room -= image.tokens
            if room < 0:
                given, left = f"an image of {image.tokens} tokens", f"{room + image.tokens} tokens, what is left"
                raise LimitExceededError(file.field, given, left, "max_tokens_per_request")
            images.append(image)
            pixels += stored
            parts += [np.full(image.tokens, self._vision.image_token, np.int64), following]
        return Placed(np.concatenate(parts), tuple(images), pixels)

    def decode(
        self,
        images: Sequence[Image],
        sent: SentImages,
        limits: ImageLimits,
        decoded: dict[str, ResizedImage],
        *,
        always: bool = False,
    ) -> tuple[Image, ...]:
        """Return the placed images of a sequence, decoded where that is wanted. Raises for a file that is damaged.

        ``decoded``: by digest, what other sequences of the request have; what is decoded now is added. ``always``:
        decode images whose features are known, too. Images that were sent as patches are returned unchanged.
        """
        if sent.patches is not None or self._trainer is None:
            return tuple(images)
        for image, file in zip(images, sent.files, strict=True):
            if image.digest not in decoded and (always or self._trainer.wants_pixels(image)):
                decoded[image.digest] = self._of_model(file.field).resized(file.file, file.field, limits)
        return tuple(replace(image, pixels=decoded.get(image.digest, image.pixels)) for image in images)

    def lacks_pixels(self, image: Image) -> bool:
        """Return whether an image is a file whose features are not known, so that a pass would have to decode it."""
        return (
            isinstance(image.pixels, EncodedImage) and self._trainer is not None and self._trainer.wants_pixels(image)
        )

    def decode_lost(self, images: Sequence[Image], field: str, decoded: dict[str, ResizedImage]) -> tuple[Image, ...]:
        """Return the images of an accepted sequence, with those decoded whose features were dropped meanwhile.

        ``decoded``: as in :meth:`decode`.
        """
        for image in images:
            file = image.pixels
            if image.digest not in decoded and isinstance(file, EncodedImage) and self.lacks_pixels(image):
                decoded[image.digest] = self._of_model(field).resized(file, field, _LARGEST)
        return tuple(replace(image, pixels=decoded.get(image.digest, image.pixels)) for image in images)

    def _between(self, tokens: IntArray, sent: SentImages, limits: ImageLimits) -> tuple[IntArray, SentImages]:
        """Return the tokens of the text, and the files with their places between these tokens."""
        is_pad = tokens == self._vision.image_token
        pads = np.flatnonzero(is_pad if sent.types is None else is_pad & (sent.types == 1))
        counts = [1] * len(sent.files)
        if len(pads) != len(counts):
            counts = [self._tokens(file, limits) for file in sent.files]
        if len(pads) != sum(counts):
            allowed = f"{len(counts)}, one for each image, or {sum(counts)}, one for each token that the images become"
            given = f"{len(pads)} image tokens ({self._vision.image_token}) beside {len(counts)} images"
            raise InvalidInputError(sent.files[0].field, given, allowed)
        files, used = [], 0
        for file, count in zip(sent.files, counts, strict=True):
            own = pads[used : used + count]
            if own[-1] - own[0] + 1 != count:
                allowed = f"{count} tokens {self._vision.image_token} in a row from index {own[0]} on"
                raise InvalidInputError(file.field, f"an image of {count} tokens", allowed)
            files.append(replace(file, before=int(own[0]) - used))
            used += count
        return np.delete(tokens, pads), SentImages(tuple(files))

    def _tokens(self, sent: SentImage, limits: ImageLimits) -> int:
        """Return how many tokens an image becomes. Only its header is read."""
        height, width = read_size(sent.file, sent.field, limits)
        return self._of_model(sent.field).size_of(height, width, sent.field).tokens

    def _place_file(self, sent: SentImage, first: int, tenant_id: str, limits: ImageLimits) -> tuple[Image, int]:
        """Return an image that begins at index ``first``, and how many pixels its file has."""
        processing = self._of_model(sent.field)
        height, width = read_size(sent.file, sent.field, limits)
        size = processing.size_of(height, width, sent.field)
        if sent.expected_tokens is not None and sent.expected_tokens != size.tokens:
            allowed = f"{size.tokens}, what {width} × {height} pixels are for {self._model}, or none"
            raise InvalidInputError(f"{sent.field}.expected_tokens", sent.expected_tokens, allowed)
        digest = owner_digest(tenant_id, sent.file.format.encode(), sent.file.data)
        return Image(first, size.rows, size.columns, digest, sent.file), height * width

    def _of_model(self, field: str) -> ImageProcessing:
        if self._processing is None:
            allowed = f"patches: {self._model} has no preprocessor_config.json, which says how images are resized"
            raise InvalidInputError(field, "an image file", allowed)
        return self._processing

    # --- images that come as patches ----------------------------------------------------------------------------------

    def _with_patches(self, tokens: IntArray, sent: SentImages, given: SentPatches, tenant_id: str) -> Placed:
        """Find the image tokens of images in a row of tokens that has them already."""
        types = None if sent.types is None else [sent.types]
        patches = RowPatches(given.patches, given.grids, given.fields)
        (images,) = place_patches([tokens], types, patches, self._vision, tenant_id)
        pixels = given.patches.shape[0] * given.patches.shape[1] // 6  # three colours, each patch twice
        return Placed(tokens, images, pixels)


def image_reader(model: str, vision: VisionSpec | None, folder: Path, trainer: SeesImages | None) -> ImageReader | None:
    """Return what reads images for a model, whose image processor is in its ``folder``; None: it reads text only."""
    if vision is None:
        return None
    return ImageReader(model, vision, ImageProcessing.from_folder(folder), trainer)
