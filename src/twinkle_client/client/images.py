"""Images in rows and conversations on their way to the server, which opens no path and no URL.

This process reads them, and sends each as a data URI with the bytes of its file. Patches that a template has made
(``pixel_values``) are sent as base64, a quarter of what they would take as numbers in JSON.
"""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

import httpx
import numpy as np

from twinkle_client.errors import invalid

__all__ = ["rows_with_images"]

_MOST_BYTES = 20 * 2**20  # of a file, as the server allows
_SECONDS = 30.0
_BEGINS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg"}
_FORMS = "a path, a URL, a data URI, base64, bytes, a Pillow image, or a dict with 'bytes' or 'path'"
_DATA_KEYS = ("image", "image_url", "url", "path", "bytes")
_BLOCKS = ("image", "image_url")


@runtime_checkable
class Picture(Protocol):
    """An image of Pillow, which this package does not require."""

    @property
    def mode(self) -> str: ...

    def convert(self, mode: str, /) -> Any: ...

    def save(self, file: Any, format: str, /) -> None: ...


def rows_with_images(inputs: Any) -> Any:
    """Return rows or conversations, one or several, with their images in the form in which they are sent.

    Values of other types, such as a reference to a batch on the server, are returned unchanged.
    """
    if isinstance(inputs, Mapping):
        return _row(inputs, "inputs")
    if isinstance(inputs, list | tuple):
        return [_row(row, f"inputs[{index}]") if isinstance(row, Mapping) else row for index, row in enumerate(inputs)]
    return inputs


def _row(row: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    if row.get("pixel_values") is not None:
        return {**row, "pixel_values": _packed(row["pixel_values"])}
    changed: dict[str, Any] = {}
    if row.get("images") is not None:
        changed["images"] = _listed(row["images"], f"{field}.images")
    beside = row.get("multi_modal_data")
    if isinstance(beside, Mapping) and beside.get("image") is not None:
        changed["multi_modal_data"] = {**beside, "image": _listed(beside["image"], f"{field}.multi_modal_data.image")}
    messages = row.get("messages")
    if isinstance(messages, list | tuple):
        sent = [_message(message, f"{field}.messages[{number}]") for number, message in enumerate(messages)]
        if any(new is not old for new, old in zip(sent, messages, strict=True)):
            changed["messages"] = sent
    return {**row, **changed} if changed else row


def _message(message: Any, field: str) -> Any:
    """Return a message with its images as data URIs; one without images is returned unchanged."""
    if not isinstance(message, Mapping):
        return message
    changed: dict[str, Any] = {}
    if message.get("images"):
        changed["images"] = _listed(message["images"], f"{field}.images")
    content = message.get("content")
    if isinstance(content, list | tuple):
        blocks = [_block(block, f"{field}.content[{number}]") for number, block in enumerate(content)]
        if any(new is not old for new, old in zip(blocks, content, strict=True)):
            changed["content"] = blocks
    return {**message, **changed} if changed else message


def _block(block: Any, field: str) -> Any:
    if not isinstance(block, Mapping) or block.get("type") not in _BLOCKS:
        return block
    key = next((key for key in _DATA_KEYS if block.get(key) is not None), None)
    if key is None:  # its image is in a list of the message or of the conversation
        return block
    return {"type": "image", "image": _sent(block[key], f"{field}.{key}")}


def _listed(images: Any, field: str) -> list[str]:
    given = images if isinstance(images, list | tuple) else [images]
    return [_sent(image, f"{field}[{number}]") for number, image in enumerate(given) if image is not None]


def _sent(image: Any, field: str) -> str:
    """Return an image in any form as a data URI; base64 text is returned unchanged."""
    if isinstance(image, str):
        return _from_text(image, field)
    if isinstance(image, os.PathLike):
        return _data_uri(_read(Path(image), field), field)
    if isinstance(image, bytes | bytearray | memoryview):
        return _data_uri(bytes(image), field)
    if isinstance(image, Mapping):
        for key in ("bytes", "image", "url", "path"):
            if image.get(key) is not None:
                return _sent(image[key], f"{field}.{key}")
    if isinstance(image, Picture):
        return _data_uri(_png(image), field)
    raise invalid(field, image, _FORMS)


def _from_text(text: str, field: str) -> str:
    scheme = text[:8].partition(":")[0].lower()
    if scheme == "data":
        return text
    if scheme in ("http", "https"):
        return _data_uri(_fetched(text, field), field)
    if scheme == "file":
        return _data_uri(_read(Path(unquote(urlsplit(text).path)), field), field)
    if len(text) < 4096 and "\n" not in text and os.path.isfile(text):  # False for a text that can be no path
        return _data_uri(_read(Path(text), field), field)
    try:
        base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        raise invalid(field, text, f"{_FORMS}; it is no file here, and no base64") from None
    return text


def _read(path: Path, field: str) -> bytes:
    try:
        with path.open("rb") as file:
            return _bounded(file.read(_MOST_BYTES + 1), field)
    except OSError as error:
        raise invalid(field, str(path), f"a file that can be read ({error.strerror})") from error


def _fetched(url: str, field: str) -> bytes:
    parts, size = [], 0
    try:
        with httpx.stream("GET", url, timeout=_SECONDS, follow_redirects=True) as answer:
            answer.raise_for_status()
            for part in answer.iter_bytes():
                parts.append(part)
                size += len(part)
                if size > _MOST_BYTES:
                    break
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise invalid(field, url, f"a URL that answers ({error})") from error
    return _bounded(b"".join(parts), field)


def _bounded(data: bytes, field: str) -> bytes:
    if len(data) > _MOST_BYTES:
        raise invalid(field, f"more than {_MOST_BYTES} bytes", f"files of at most {_MOST_BYTES} bytes")
    return data


def _data_uri(data: bytes, field: str) -> str:
    """Return a file as a data URI. A file that is neither PNG nor JPEG becomes PNG, if Pillow is installed."""
    format = next((name for begins, name in _BEGINS.items() if data.startswith(begins)), None)
    if format is None:
        data, format = _converted(data, field), "png"
    return f"data:image/{format};base64,{base64.b64encode(data).decode()}"


def _converted(data: bytes, field: str) -> bytes:
    given = f"{len(data)} bytes that begin with {data[:8].hex(' ')}"
    try:
        from PIL import Image
    except ImportError:
        raise invalid(field, given, "a PNG or JPEG file; other formats need the package pillow") from None
    try:
        return _png(Image.open(io.BytesIO(data)))
    except (OSError, Image.DecompressionBombError) as error:
        raise invalid(field, given, "an image file") from error


def _png(picture: Picture) -> bytes:
    """Return a picture as a PNG file, with the pixels that the library makes of it: RGB, or grey."""
    written = io.BytesIO()
    if picture.mode.startswith("I"):  # 16 bits of grey: Pillow's own conversion would cut off bright values
        plain = picture.convert("I").point(lambda value: value / 257).convert("L")
    else:
        plain = picture if picture.mode in ("RGB", "L") else picture.convert("RGB")
    plain.save(written, "PNG")
    return written.getvalue()


def _packed(patches: Any) -> Any:
    """Return patches in the packed form; what is no array of numbers is returned unchanged, for the server's error."""
    if isinstance(patches, Mapping):
        return patches
    if not isinstance(patches, np.ndarray | Sequence):
        try:
            patches = np.asarray(patches)
        except (TypeError, RuntimeError):  # a tensor on another device, or one with a gradient
            patches = patches.tolist()
    try:
        array = np.asarray(patches, "<f4")
    except (TypeError, ValueError):
        return patches
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": "float32", "shape": list(array.shape), "data": data}
