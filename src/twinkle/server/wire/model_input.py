"""The chunks of a sequence on the wire, in JSON and in protobuf: tokens of text, with images between them.

Images are not decoded here, and nothing here opens a path or a URL.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.images import EncodedImage, SentImage, SentImages
from twinkle.model.types import IntArray
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.fields import Request, TokenIds, short
from twinkle.server.wire.image_files import ImageAllowance, from_base64
from twinkle.server.wire.tensors import read_array

TEXT, IMAGE = "encoded_text", "image"
_ASSET = "image_asset_pointer"
_ALLOWED = f"{TEXT} or {IMAGE}"
_INT32 = np.dtype("<i4")
_MAX_CHUNKS = 4096  # of a sequence, in JSON and in protobuf


class Chunk(Request):
    """A chunk of tokens, or an image as base64. Chunks of other types are parsed only so that errors can name them.

    SDKs up to 0.24 leave the type out if their caller did; the other fields tell what the chunk is.
    """

    type: str | None = None
    tokens: TokenIds | None = None
    data: str | None = None
    format: str | None = None
    expected_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    override_dimensions: Any = None
    location: Any = None

    @property
    def kind(self) -> str:
        if self.type is not None:
            return self.type
        return IMAGE if self.data is not None else _ASSET if self.location is not None else TEXT


class ModelInput(Request):
    chunks: Annotated[list[Chunk], Field(max_length=_MAX_CHUNKS, fail_fast=True)]


def read_json(given: ModelInput, where: str, left: ImageAllowance) -> tuple[IntArray, SentImages]:
    """Return the tokens of all text chunks, one after another, (T,), and the images between them.

    ``where`` names the list of chunks in errors. Each image is subtracted from what is ``left``.
    """
    parts: list[IntArray] = []
    images = []
    before = 0
    for number, chunk in enumerate(given.chunks):
        field = f"{where}[{number}]"
        if chunk.kind == TEXT:
            if chunk.tokens is None:
                raise InvalidInputError(f"{field}.tokens", None, "a list of token ids")
            parts.append(np.array(chunk.tokens, np.int64))
            before += len(chunk.tokens)
        elif chunk.kind == IMAGE:
            if chunk.override_dimensions is not None:
                raise _no_override(field, chunk.override_dimensions)
            file = EncodedImage(from_base64(chunk.data, field, left), chunk.format or "")
            images.append(_image(before, file, chunk.expected_tokens, field, left))
        else:
            raise _unsupported(f"{field}.type", short(chunk.kind), is_asset=chunk.kind == _ASSET)
    return _joined(parts), SentImages(tuple(images))


def read_protobuf(chunks: Sequence[pb.Chunk], where: str, left: ImageAllowance) -> tuple[IntArray, SentImages]:
    """Return the tokens of all text chunks and the images between them, as :func:`read_json` does."""
    if len(chunks) > _MAX_CHUNKS:
        raise InvalidInputError(where, f"{len(chunks)} chunks", f"at most {_MAX_CHUNKS} chunks in a sequence")
    parts: list[IntArray] = []
    images = []
    before = 0
    for number, chunk in enumerate(chunks):
        kind, field = chunk.WhichOneof("chunk"), f"{where}[{number}]"
        if kind == TEXT:
            parts.append(read_array(chunk.encoded_text.tokens, _INT32, f"{field}.tokens"))
            before += len(parts[-1])
        elif kind == IMAGE:
            sent = chunk.image
            if sent.HasField("override_dimensions"):
                raise _no_override(field, f"{sent.override_dimensions.width} × {sent.override_dimensions.height}")
            expected = sent.expected_tokens if sent.HasField("expected_tokens") else None
            images.append(_image(before, EncodedImage(sent.data, sent.format), expected, field, left))
        else:
            raise _unsupported(field, kind or "an empty chunk", is_asset=False)
    return _joined(parts), SentImages(tuple(images))


def _image(before: int, file: EncodedImage, expected: int | None, field: str, left: ImageAllowance) -> SentImage:
    left.take(len(file.data), field)
    return SentImage(before, file, expected, field)


def _no_override(field: str, given: object) -> UnsupportedError:
    return UnsupportedError(
        f"{field}.override_dimensions: got {short(given)}, allowed: none (resize the image before you send it)"
    )


def _unsupported(field: str, given: str, *, is_asset: bool) -> UnsupportedError:
    why = " (this server stores no images and never opens a location: send the bytes of the image)" if is_asset else ""
    return UnsupportedError(f"{field}: got {given}, allowed: {_ALLOWED}{why}")


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)
