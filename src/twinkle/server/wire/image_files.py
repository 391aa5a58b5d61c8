"""Image files in JSON: as base64, as data URIs, and in the forms that messages of the native protocol may have.

Nothing here decodes an image, and nothing opens a path or a URL: whoever can make a server open one can read its files
and its network.
"""

import base64
import binascii
from dataclasses import dataclass

from twinkle.errors import InvalidInputError, LimitExceededError
from twinkle.images import EncodedImage, ImageLimits, ImageSource

NOTHING_OUTSIDE = ImageSource(outside=False)
_BASE64 = 4 / 3  # characters a byte


@dataclass
class ImageAllowance:
    """The images that a request may still have while it is read, and the bytes that each of them may have."""

    images: int = 2**31
    file_bytes: int = ImageLimits().file_bytes

    def take(self, size: int, field: str) -> None:
        """Subtract an image file of ``size`` bytes, or raise LimitExceededError."""
        self.images -= 1
        if self.images < 0:
            raise LimitExceededError(
                field, "one more image", "no more images in this request", "max_images_per_request"
            )
        self.check_size(size, field)

    def check_size(self, size: int, field: str) -> None:
        """Raise LimitExceededError if an image file of ``size`` bytes is too large."""
        if size > self.file_bytes:
            allowed = f"at most {self.file_bytes} bytes"
            raise LimitExceededError(f"{field}.data", f"{size} bytes", allowed, "max_image_bytes")


def from_base64(data: object, field: str, left: ImageAllowance) -> bytes:
    """Return the bytes of a file. Its size is checked before it is decoded. ``field`` names the image in errors."""
    allowed = "an image file as base64, without spaces, line breaks and a prefix"
    if not isinstance(data, str):
        raise InvalidInputError(f"{field}.data", data, allowed)
    left.check_size(int((len(data) - 4) / _BASE64), field)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):  # ValueError: characters beyond ASCII
        raise InvalidInputError(f"{field}.data", data[:80], allowed) from None


def from_data_uri(uri: str, field: str, left: ImageAllowance) -> EncodedImage:
    """Return the file in a data URI, and subtract it from what is ``left``. Any other URI is refused."""
    if uri[:5].lower() != "data:":
        raise InvalidInputError(field, uri[:120], "data:image/png;base64,…, or jpeg (this server opens no URL)")
    return from_message(uri, field, left)


def from_message(value: object, field: str, left: ImageAllowance) -> EncodedImage:
    """Return an image of a message or a row: a data URI, base64, or a mapping with either under ``bytes``.

    It is subtracted from what is ``left``. Paths and URLs are refused.
    """
    file = NOTHING_OUTSIDE.open(value, field)
    if not isinstance(file, EncodedImage):
        raise InvalidInputError(field, type(file).__name__, "a PNG or JPEG file as base64 or as a data URI")
    left.take(len(file.data), field)
    return file


def data_uri(file: EncodedImage) -> str:
    """Return an image file as text."""
    return f"data:image/{file.format};base64,{base64.b64encode(file.data).decode()}"
