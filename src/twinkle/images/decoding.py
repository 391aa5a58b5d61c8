"""Reads PNG and JPEG images that nobody has checked.

The header says how large an image is. It is checked before a pixel is decoded, so that a small file cannot fill the
memory. Only the decoder of the named format runs, on a bare file, and nothing here opens a path or a URL.
"""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinkle.errors import InvalidInputError
from twinkle.extras import require
from twinkle.images.bare_files import bare_jpeg, bare_png

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

_FORMATS = {"png": "PNG", "jpeg": "JPEG"}


@dataclass(frozen=True)
class EncodedImage:
    """The bytes of an image file, and its format: png or jpeg."""

    data: bytes
    format: str


@dataclass(frozen=True)
class ImageLimits:
    """The largest image that is decoded: the bytes of its file, and the pixels that it has when it is decoded."""

    file_bytes: int = 20 * 2**20
    pixels: int = 32 * 2**20


_LIMITS = ImageLimits()


def read_size(encoded: EncodedImage, field: str = "image", limits: ImageLimits = _LIMITS) -> tuple[int, int]:
    """Return (height, width) of an image without decoding its pixels. Raises as :func:`read_image` does."""
    with _opened(encoded, field, limits) as image:
        return image.height, image.width


def read_image(encoded: EncodedImage, field: str = "image", limits: ImageLimits = _LIMITS) -> "PillowImage":
    """Return the image in RGB. Transparency is ignored, and of an animation the first picture counts.

    The EXIF tag that asks to turn the image is not heeded: clients count tokens on the stored pixels. Raises
    InvalidInputError, with ``field`` as the name, for what is no image of its format, is too large, or has too many
    parts.
    """
    with _opened(encoded, field, limits) as image:
        try:
            image.load()
            return as_rgb(image)
        except Exception as error:  # an edge: Pillow raises errors of many types for files that are damaged
            raise _damaged(field, encoded, error) from error


def _opened(encoded: EncodedImage, field: str, limits: ImageLimits) -> "PillowImage":
    require("PIL", "an image")
    from PIL import Image

    if not isinstance(encoded.data, bytes) or not encoded.data:
        raise InvalidInputError(f"{field}.data", encoded.data, "the bytes of an image file")
    if encoded.format not in _FORMATS:
        raise InvalidInputError(f"{field}.format", encoded.format, " or ".join(_FORMATS))
    if len(encoded.data) > limits.file_bytes:
        raise InvalidInputError(f"{field}.data", f"{len(encoded.data)} bytes", f"at most {limits.file_bytes} bytes")
    bare = bare_png(encoded.data, field) if encoded.format == "png" else bare_jpeg(encoded.data, field)
    try:
        image = Image.open(io.BytesIO(bare), formats=[_FORMATS[encoded.format]])
    except Image.DecompressionBombError as error:
        raise InvalidInputError(f"{field}.data", str(error)[:100], f"at most {limits.pixels} pixels") from error
    except Exception as error:  # an edge, as in read_image
        raise _damaged(field, encoded, error) from error
    if image.width * image.height > limits.pixels:
        size = f"{image.width} × {image.height} pixels"
        raise InvalidInputError(f"{field}.data", size, f"at most {limits.pixels} pixels")
    return image


def as_rgb(image: "PillowImage") -> "PillowImage":
    """Return an image in RGB. Raises OSError for a file that Pillow cannot read to its end."""
    if image.mode.startswith("I"):  # 16 bits of grey: Pillow's own conversion would cut off bright values
        image = image.convert("I").point(lambda value: value / 257).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")  # convert would copy it, 4 bytes a pixel


def _damaged(field: str, encoded: EncodedImage, error: Exception) -> InvalidInputError:
    begins = encoded.data[:8].hex(" ")
    given = f"{len(encoded.data)} bytes that begin with {begins} ({type(error).__name__})"
    return InvalidInputError(f"{field}.data", given, f"a whole {encoded.format} file")
