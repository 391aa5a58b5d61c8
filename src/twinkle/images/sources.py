"""Reads images in the forms in which users write them: files, addresses, texts with encoded bytes, Pillow's images."""

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from os.path import isfile
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from twinkle.errors import InvalidInputError
from twinkle.extras import require
from twinkle.images.decoding import EncodedImage, ImageLimits, as_rgb, read_image

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

_MAGIC = {b"\x89PNG": "png", b"\xff\xd8": "jpeg"}
_OTHER_FORMATS = ("BMP", "GIF", "TIFF", "WEBP")  # read by Pillow alone, and only where outside=True
_FORMS = (
    "an image: a file's bytes, base64 text, a data URI, a Pillow image, a path or URL, or a dict with 'bytes', 'path' "
    "or 'url'"
)
_FORMS_INSIDE = (
    "a PNG or JPEG file as base64 text or a data URI, or a dict with one of them in 'bytes'; paths and URLs are read "
    "by the client"
)
_ESCAPES = {"%2B": "+", "%2F": "/", "%3D": "=", "%0D": "", "%0A": ""}  # what writers of URIs escape in base64
_SECONDS = 10  # for an answer of a web server
_ATTEMPTS = 3


@dataclass(frozen=True)
class ImageSource:
    """The places where images may come from, and how large they may be.

    ``outside``: whether paths and URLs are opened. A server must not: its clients would read its files and its network.
    """

    outside: bool = True
    limits: ImageLimits = field(default_factory=ImageLimits)

    def open(self, value: object, field: str = "image") -> "EncodedImage | PillowImage":
        """Return an image that a user wrote in any form: the bytes of its file, or Pillow's image. Decodes no pixels.

        Only bytes that begin as PNG or JPEG are an EncodedImage. Raises InvalidInputError with ``field`` as the name.
        """
        found = self._found(value, field)
        return self._file(found, field) if isinstance(found, bytes) else found

    def read(self, value: object, field: str = "image") -> "PillowImage":
        """Return an image, given in any form, in RGB. Raises as :meth:`open` does, and for one that is too large."""
        opened = self.open(value, field)
        if isinstance(opened, EncodedImage):
            return read_image(opened, field, self.limits)
        if opened.width * opened.height > self.limits.pixels:
            size = f"{opened.width} × {opened.height} pixels"
            raise InvalidInputError(field, size, f"at most {self.limits.pixels} pixels")
        try:
            opened.load()
            return as_rgb(opened)
        except OSError as error:  # Pillow opens a file when it is first read
            raise InvalidInputError(field, f"{type(error).__name__}: {error}", "a whole image") from error

    def _allowed(self) -> str:
        return _FORMS if self.outside else _FORMS_INSIDE

    def _found(self, value: object, field: str) -> "bytes | EncodedImage | PillowImage":
        if _is_pillow(value) or isinstance(value, EncodedImage):
            return value  # type: ignore[return-value]
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, Mapping):
            return self._from_mapping(value, field)
        if isinstance(value, PathLike):
            return self._read_path(fspath(value), field)
        if isinstance(value, str) and value:
            return self._from_text(value, field)
        raise InvalidInputError(field, _shown(value), self._allowed())

    def _from_mapping(self, value: Mapping[object, object], field: str) -> "bytes | EncodedImage | PillowImage":
        """Read the form in which datasets keep images, {"bytes": …, "path": …}; bytes go before a path."""
        for key in ("bytes", "image", "url", "path"):
            given = value.get(key)
            if isinstance(given, Mapping):  # a client may nest them deeper than Python's stack
                raise InvalidInputError(f"{field}.{key}", f"a dict with {sorted(map(str, given))}", self._allowed())
            if given is not None:
                return self._found(given, f"{field}.{key}")
        raise InvalidInputError(field, f"a dict with {sorted(map(str, value))}", self._allowed())

    def _from_text(self, text: str, field: str) -> bytes:
        scheme = text[:8].partition(":")[0].lower()
        if scheme == "data":
            return self._from_data_uri(text, field)
        if scheme in ("http", "https", "file"):
            self._require_outside(text, field)
            return self._download(text, field)
        if self.outside and isfile(text):  # of a text that can be no path, it is False
            return self._read_path(text, field)
        self._check_characters(text, field)
        data = _from_base64(text)
        if not data:
            missing = "no file, and no base64 text" if self.outside else "no base64 text"
            raise InvalidInputError(field, f"{_shown(text)} ({missing})", self._allowed())
        return data

    def _from_data_uri(self, text: str, field: str) -> bytes:
        self._check_characters(text, field)
        head, comma, body = text.partition(",")
        data = _from_base64(_unescaped(body)) if comma and head.lower().endswith(";base64") else None
        if not data:
            raise InvalidInputError(field, _shown(text), "data:image/png;base64,…, or jpeg")
        return data

    def _check_characters(self, text: str, field: str) -> None:
        """Raise for a text that is too long for a file in base64, which takes 4/3 of its bytes, and line breaks."""
        most = 2 * self.limits.file_bytes + 100
        if len(text) > most:
            raise InvalidInputError(field, f"{len(text)} characters", f"at most {self.limits.file_bytes} bytes")

    def _require_outside(self, value: str, field: str) -> None:
        if not self.outside:
            raise InvalidInputError(field, _shown(value), self._allowed())

    def _read_path(self, path: str, field: str) -> bytes:
        self._require_outside(path, field)
        try:
            with open(path, "rb") as file:
                return self._bounded(file.read(self.limits.file_bytes + 1), field)
        except OSError as error:
            raise InvalidInputError(field, path, f"a file that can be read ({error.strerror})") from error

    def _download(self, url: str, field: str) -> bytes:
        if url.lower().startswith("file:"):
            return self._read_path(unquote(urlsplit(url).path), field)
        request = Request(url, headers={"User-Agent": "twinkle"})
        for attempt in range(_ATTEMPTS):
            try:
                with urlopen(request, timeout=_SECONDS) as answer:
                    data: bytes = answer.read(self.limits.file_bytes + 1)
            except (OSError, ValueError) as error:  # OSError: also what urllib raises
                if attempt == _ATTEMPTS - 1 or isinstance(error, HTTPError | ValueError):
                    raise InvalidInputError(field, _shown(url), f"a URL that answers ({error})") from error
            else:
                return self._bounded(data, field)
        raise AssertionError("the last attempt returns or raises")

    def _bounded(self, data: bytes, field: str) -> bytes:
        if len(data) > self.limits.file_bytes:
            most = self.limits.file_bytes
            raise InvalidInputError(field, f"more than {most} bytes", f"at most {most} bytes")
        return data

    def _file(self, data: bytes, field: str) -> "EncodedImage | PillowImage":
        for begins, name in _MAGIC.items():
            if data.startswith(begins):
                return EncodedImage(data, name)
        given = f"{len(data)} bytes that begin with {data[:8].hex(' ')}"
        if not self.outside:
            raise InvalidInputError(field, given, "a png or jpeg file")
        require("PIL", "an image")
        from PIL import Image, UnidentifiedImageError

        try:
            return Image.open(io.BytesIO(self._bounded(data, field)), formats=_OTHER_FORMATS)
        except (UnidentifiedImageError, Image.DecompressionBombError) as error:
            formats = ", ".join(["png", "jpeg", *map(str.lower, _OTHER_FORMATS)])
            raise InvalidInputError(field, given, f"an image file: {formats}") from error


def load_image(image: object) -> "PillowImage":
    """Return an image in RGB: a path, a URL, a data URI, base64 text, bytes, Pillow's, or a dict with one of them."""
    return ImageSource().read(image)


def load_mm_file(file: object) -> io.BytesIO:
    """Return the bytes of a media file: of a path, a URL, a data URI, base64 text, or bytes."""
    found = ImageSource()._found(file, "file")
    if isinstance(found, EncodedImage):
        return io.BytesIO(found.data)
    if not isinstance(found, bytes):
        raise InvalidInputError("file", _shown(file), "bytes, base64 text, a data URI, a path or URL")
    return io.BytesIO(found)


def _is_pillow(value: object) -> bool:
    """Return whether a value is Pillow's image. Pillow is not imported: who has made one has imported it."""
    return any(f"{each.__module__}.{each.__qualname__}" == "PIL.Image.Image" for each in type(value).__mro__)


def _from_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def _unescaped(body: str) -> str:
    """Return the body of a data URI without escapes of base64's characters; others are none of an image."""
    if "%" not in body:
        return body
    for escaped, character in _ESCAPES.items():
        body = body.replace(escaped, character).replace(escaped.lower(), character)
    return body


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
