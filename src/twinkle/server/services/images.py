"""Images of requests on their way to the trainer or the sampler: placed among the tokens, then decoded.

Both happen in a pool of a few threads that tenants share fairly, because a large image takes up to a second. First only
the headers are read. They say how many tokens the images have, so the price of a request is known before a pixel is
decoded. What waits is the resized image; patches, which take more memory, are made of it when the vision tower runs.
"""

from collections.abc import Sequence
from dataclasses import replace

from twinkle.errors import InvalidInputError, LimitExceededError, UserError
from twinkle.images import ImageLimits, ResizedImage, SentImages
from twinkle.images.sent import NO_IMAGES
from twinkle.sampler.types import SampleRequest
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.image_reader import ImageReader
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import Op, Pass, Payload, Refused
from twinkle.server.wire.sampling import with_images

_UNLIMITED = 2**62  # tokens
_LARGEST = ImageLimits()  # the configuration can only set lower limits


class RequestImages:
    """Reads the images of one base model's requests. Belongs to the event loop.

    ``limits``: those of the request's tenant. None in a replay: an op that was accepted under higher limits must not be
    refused.
    """

    def __init__(self, model: ServedModel, pool: FairPool) -> None:
        self._model = model
        self._pool = pool

    async def place(self, op: Op, tenant_id: str, limits: LimitsConfig | None) -> Op:
        """Return an op that has images with them among its tokens.

        If an image cannot be placed, the payload of the returned op is :class:`Refused`.
        """
        asked = op.payload
        assert isinstance(asked, Pass), "only passes have images"

        def placed() -> Payload:
            try:
                return self._placed(asked, tenant_id, limits)
            except UserError as error:
                return Refused.because(error)

        payload = await self._pool.in_thread(tenant_id, placed)
        return replace(op, payload=payload, sent_digest=op.digest)

    async def decode(self, op: Op, tenant_id: str, limits: LimitsConfig | None) -> Op:
        """Return an op that :meth:`place` returned with those images decoded whose features are not known.

        If an image cannot be decoded, the payload of the returned op is :class:`Refused`.
        """
        asked = op.payload
        if not isinstance(asked, Pass) or not op.waits_for_images:
            return op

        def decoded() -> Payload:
            try:
                return self._decoded(asked, limits)
            except UserError as error:
                return Refused.because(error)

        payload = await self._pool.in_thread(tenant_id, decoded)
        return replace(op, payload=payload, sent_digest=op.digest)

    def lacks_pixels(self, op: Op) -> bool:
        """Return whether an op that is to run now has images whose features were known and then dropped."""
        asked, reader = op.payload, self._model.images
        if not isinstance(asked, Pass) or reader is None:
            return False
        return any(reader.lacks_pixels(image) for each in asked.sequences for image in each.images)

    async def decode_lost(self, op: Op, tenant_id: str) -> Op:
        """Return an op that is to run now with those images decoded whose features were known and then dropped."""
        asked, reader = op.payload, self._model.images
        if not self.lacks_pixels(op) or not isinstance(asked, Pass) or reader is None:
            return op
        sequences = asked.sequences

        def decoded() -> Payload:
            again: dict[str, ResizedImage] = {}
            found = [
                replace(each, images=reader.decode_lost(each.images, f"images of sequence {index}", again))
                for index, each in enumerate(sequences)
            ]
            return asked.placed(found, asked.pixels)

        payload = await self._pool.in_thread(tenant_id, decoded)
        return replace(op, payload=payload, sent_digest=op.digest)

    async def place_in_prompts(
        self, requests: Sequence[SampleRequest], sent: Sequence[SentImages], tenant_id: str, limits: LimitsConfig
    ) -> tuple[list[SampleRequest], list[int]]:
        """Return the prompts of one request of a client with their images, and how many pixels the files of each have.

        ``sent``: the images of each prompt; it may have none. The limits on a request are for all prompts together.
        """

        def placed() -> tuple[list[SampleRequest], list[int]]:
            room = _room(limits, sum(len(each.prompt) for each in requests))
            prompts: list[SampleRequest] = []
            pixels: list[int] = []
            for request, images in zip(requests, sent, strict=True):
                stored = 0
                if images:
                    found = self._reader(images).place(request.prompt, images, tenant_id, _of(limits), room)
                    room -= len(found.tokens) - len(request.prompt)
                    stored = found.pixels
                    _check_pixels(sum(pixels) + stored, images.field, limits)
                    request = with_images(request, found.tokens, found.images)
                prompts.append(request)
                pixels.append(stored)
            return prompts, pixels

        return await self._pool.in_thread(tenant_id, placed)

    async def decode_prompts(
        self, requests: Sequence[SampleRequest], sent: Sequence[SentImages], tenant_id: str, limits: LimitsConfig
    ) -> list[SampleRequest]:
        """Return the prompts that :meth:`place_in_prompts` returned with their images decoded.

        Also those whose features are known: a prompt may wait in the sampler for long, and the features may be dropped
        meanwhile; and vLLM has caches of its own.
        """

        def decoded() -> list[SampleRequest]:
            found: dict[str, ResizedImage] = {}
            return [
                replace(
                    request, images=self._reader(images).decode(request.images, images, _of(limits), found, always=True)
                )
                if images
                else request
                for request, images in zip(requests, sent, strict=True)
            ]

        return await self._pool.in_thread(tenant_id, decoded)

    async def read(self, asked: Pass, tenant_id: str, limits: LimitsConfig) -> Pass:
        """Return a pass that is not journalled with its images placed and decoded."""

        def read() -> Pass:
            return self._decoded(self._placed(asked, tenant_id, limits), limits)

        return await self._pool.in_thread(tenant_id, read)

    # --- in threads of the pool ---------------------------------------------------------------------------------------

    def _placed(self, asked: Pass, tenant_id: str, limits: LimitsConfig | None) -> Pass:
        room, pixels, sequences = _room(limits, asked.tokens), 0, []
        for each in asked.sequences:
            if each.sent:
                found = self._reader(each.sent).place(each.tokens, each.sent, tenant_id, _of(limits), room)
                room -= len(found.tokens) - len(each.tokens)
                pixels += found.pixels
                _check_pixels(pixels, each.sent.field, limits)
                each = replace(each, tokens=found.tokens, images=found.images)
            sequences.append(each)
        return asked.placed(sequences, pixels)

    def _decoded(self, asked: Pass, limits: LimitsConfig | None) -> Pass:
        found: dict[str, ResizedImage] = {}
        sequences = []
        for each in asked.sequences:
            if each.sent:
                images = self._reader(each.sent).decode(each.images, each.sent, _of(limits), found)
                each = replace(each, images=images, sent=NO_IMAGES)
            sequences.append(each)
        return asked.placed(sequences, asked.pixels)

    def _reader(self, sent: SentImages) -> ImageReader:
        reader = self._model.images
        if reader is None:
            raise InvalidInputError(
                sent.field, "an image", f"text: {self._model.name}, as it is served here, reads text only"
            )
        return reader


def _check_pixels(pixels: int, field: str, limits: LimitsConfig | None) -> None:
    """Raise LimitExceededError if the images of a request up to ``field`` have too many pixels to be decoded."""
    if limits is not None and pixels > limits.max_pixels_per_request:
        given = f"images of {pixels} pixels up to here"
        allowed = f"at most {limits.max_pixels_per_request} in a request"
        raise LimitExceededError(field, given, allowed, "max_pixels_per_request")


def _of(limits: LimitsConfig | None) -> ImageLimits:
    return _LARGEST if limits is None else ImageLimits(limits.max_image_bytes, limits.max_image_pixels)


def _room(limits: LimitsConfig | None, tokens: int) -> int:
    """Return how many tokens the images of a request may have beside these ``tokens`` of text."""
    return _UNLIMITED if limits is None else max(0, limits.max_tokens_per_request - tokens)
