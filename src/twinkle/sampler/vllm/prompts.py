"""Prompts as vLLM takes them: token ids, and for a vision model the pictures among them.

vLLM makes the patches and features of a picture itself. It gets pictures that already have the size at which the model
sees them, so its image processor does not resize them: what vLLM has installed would resize by different code. A prompt
for vLLM has one image token a picture, and vLLM puts in the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image as Pillow
from vllm import TokensPrompt

from twinkle.errors import InvalidInputError
from twinkle.images import EncodedImage, ImageProcessing, ImageSize, ResizedImage
from twinkle.model.types import FloatArray, Image, IntArray, VisionSpec

# A step of a colour changes a number of a patch by 1 / (255 · its deviation), about 0.01.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Prompt:
    """A prompt (T,), its images, which :meth:`Pictures.resized` returned, and the scope of its cached beginnings."""

    tokens: IntArray
    images: Sequence[Image] = ()
    scope: str = ""

    def for_vllm(self) -> TokensPrompt:
        kept = np.ones(len(self.tokens), bool)
        for image in self.images:
            kept[image.first + 1 : image.first + image.tokens] = False
        prompt = TokensPrompt(prompt_token_ids=self.tokens[kept].tolist())
        if self.scope:  # vLLM refuses an empty salt
            prompt["cache_salt"] = self.scope
        if self.images:
            prompt["multi_modal_data"] = {"image": [_picture(image) for image in self.images]}
            # The names under which vLLM caches what it made of a picture. Those of different tenants differ.
            names = [f"{image.digest}-{image.rows}x{image.columns}" for image in self.images]
            prompt["multi_modal_uuids"] = {"image": names}
        return prompt


class Pictures:
    """Prepares the images of requests for vLLM. ``most``: how many a prompt may have."""

    def __init__(self, processing: ImageProcessing, vision: VisionSpec, most: int) -> None:
        self._processing = processing
        self._vision = vision
        self._most = most

    def resized(self, tokens: IntArray, images: Sequence[Image]) -> tuple[Image, ...]:
        """Return the images of a prompt at the size at which the model sees them. Raise if vLLM cannot take them."""
        if not images:
            return ()
        if len(images) > self._most:
            allowed = f"at most {self._most} in a prompt, which is engine_args.limit_mm_per_prompt"
            raise InvalidInputError("images", f"{len(images)} images", allowed)
        self._check_other_tokens(tokens, images)
        return tuple(replace(image, pixels=self._pixels(image, f"images[{n}]")) for n, image in enumerate(images))

    def _check_other_tokens(self, tokens: IntArray, images: Sequence[Image]) -> None:
        """Raise if an image token that is text stands before an image: vLLM would put the image in its place."""
        text = tokens[: images[-1].first].copy()
        for image in images:
            text[image.first : image.first + image.tokens] = -1
        others = np.flatnonzero(text == self._vision.image_token)
        if len(others):
            allowed = f"no token {self._vision.image_token} of text before an image: vLLM takes it for the image"
            raise InvalidInputError(f"prompt[{others[0]}]", self._vision.image_token, allowed)

    def _pixels(self, image: Image, field: str) -> ResizedImage:
        size, pixels = ImageSize(image.rows, image.columns), image.pixels
        if isinstance(pixels, EncodedImage):
            pixels = self._processing.resized(pixels, field)
        elif not isinstance(pixels, ResizedImage):
            pixels = self._drawn(pixels, size, field)
        found = self._processing.size_seen(pixels)
        if found != size:
            given, allowed = f"{size.rows} × {size.columns} tokens", f"{found.rows} × {found.columns}, its size"
            raise InvalidInputError(field, given, allowed)
        return pixels

    def _drawn(self, patches: FloatArray, size: ImageSize, field: str) -> ResizedImage:
        """Return the picture that patches were made of. Raise if no picture has them."""
        drawn = self._processing.picture(patches, size)
        if not np.allclose(self._processing.patches_of(drawn), patches, atol=_ROUNDING):
            allowed = "patches that the model's image processor makes of a picture: vLLM takes no others"
            raise InvalidInputError(f"{field}.pixels", "patches of no picture", allowed)
        return drawn


def _picture(image: Image) -> Pillow.Image:
    assert isinstance(image.pixels, ResizedImage), "Pictures.resized made it"
    return Pillow.fromarray(image.pixels.rgb_HW3)
