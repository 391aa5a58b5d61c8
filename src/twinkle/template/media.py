"""Images in conversations: where they stand among the messages, and what a row of tokens has for them.

A conversation may have images in three forms: a list of the whole trajectory, lists of its messages (``images``), and
blocks of content (``{"type": "image", "image": …}``). All of them become blocks that hold their image.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.images import EncodedImage, ImageProcessing, ImageSize, ImageSource, position_axes
from twinkle.images.decoding import read_size
from twinkle.images.positions import first_tokens, sizes_in_tokens
from twinkle.images.processing import VISION_FAMILIES
from twinkle.template.labels import IGNORE, IntArray
from twinkle.template.messages import plain_text, refuse_beside_tokens

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = ["ImageEncoder", "VisionProcessor", "images_of", "refuse_unread", "with_image_blocks"]

Dict = dict[str, Any]
Found = tuple[object, str]  # an image as a user wrote it, and its name in errors
OpenImage = Callable[[object, str], Any]

_BLOCK_TYPES = ("image", "image_url")
_DATA_KEYS = ("image", "image_url", "url", "path", "bytes")
_SEE = ("user", "tool")  # whose messages may have images

_logger = logging.getLogger(__name__)


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a trajectory or of a row, in their order in the conversation.

    They are those of ``images``, of a row's ``multi_modal_data["image"]``, or of the messages: of their lists and of
    their blocks.
    """
    if row.get("images"):
        return _listed(row["images"])
    beside = row.get("multi_modal_data")
    if beside and isinstance(beside, Mapping) and row.get("input_ids") is not None:
        return _listed(beside.get("image"))
    return [image for message in row.get("messages") or [] for image in _message_images(message)]


def _message_images(message: Mapping[str, Any]) -> list[Any]:
    """Return the images of a message in the order that :func:`_filled` gives them."""
    own = _listed(message.get("images"))
    inline = [_data(block) for block in _blocks(message) if block.get("type") in _BLOCK_TYPES]
    first = max(len(own) - sum(image is None for image in inline), 0) if inline else len(own)
    placed = iter(own[first:])
    found = [next(placed, None) if image is None else image for image in inline]
    return own[:first] + [image for image in found if image is not None]


def refuse_unread(trajectory: Mapping[str, Any]) -> None:
    """Raise for what is neither text nor an image, anywhere in a trajectory: videos, sounds, values of other types.

    Also for images beside tokens, because a trajectory has no tokens.
    """
    refuse_beside_tokens(trajectory)
    for kind in ("videos", "audios"):
        if trajectory.get(kind):
            raise _unread(kind)
    for number, message in enumerate(trajectory["messages"]):
        for kind in ("videos", "audios"):
            if message.get(kind):
                raise _unread(f"messages[{number}].{kind}")
        _check_content(message.get("content"), f"messages[{number}].content")


def _check_content(content: object, field: str) -> None:
    """Raise unless the content of a message is a text, a list of blocks of text and images, or nothing."""
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise InvalidInputError(field, content, "a text, or a list of blocks")
    for place, block in enumerate(content):
        if not isinstance(block, Mapping):
            allowed = "a block {'type': 'text', 'text': …} or {'type': 'image', 'image': …}"
            raise InvalidInputError(f"{field}[{place}]", block, allowed)
        if block.get("type") not in ("text", *_BLOCK_TYPES):
            raise _unread(f"{field}[{place}] of type {str(block.get('type'))[:80]}")


def with_image_blocks(trajectory: Dict, placeholder: str, open_image: OpenImage) -> Dict:
    """Return a trajectory whose images are blocks of its messages, in the form that ``open_image`` returns.

    Images take the places of ``placeholder`` in texts, and of image blocks without data: those of a message's list in
    this message, those of the trajectory in all of them. If they are more than the places, the first ones are put
    before the text of the message, or of the first user. Messages without images become plain texts.
    """
    messages: Sequence[Dict] = trajectory["messages"]
    images = _shared(trajectory, placeholder) if trajectory.get("images") else _own(messages)
    contents = [_filled(number, message, images[number], placeholder) for number, message in enumerate(messages)]
    standard = [_standard(message, content, open_image) for message, content in zip(messages, contents, strict=True)]
    kept = {key: value for key, value in trajectory.items() if key != "images"}
    return {**kept, "messages": standard}


def _own(messages: Sequence[Dict]) -> list[list[Found]]:
    """Return the images of each message's own list."""
    own: list[list[Found]] = []
    for place, message in enumerate(messages):
        field = f"messages[{place}].images"
        own.append([(image, f"{field}[{number}]") for number, image in enumerate(_listed(message.get("images")))])
        if own[-1]:
            _check_sees(message, field)
    return own


def _shared(trajectory: Dict, placeholder: str) -> list[list[Found]]:
    """Return which of the trajectory's images each message gets. Of texts, only the user's have places for them."""
    messages: Sequence[Dict] = trajectory["messages"]
    left: list[Found] = [(image, f"images[{number}]") for number, image in enumerate(_listed(trajectory["images"]))]
    counts = [
        _places(message, placeholder) if message["role"] == "user" or not isinstance(message.get("content"), str) else 0
        for message in messages
    ]
    surplus = len(left) - sum(counts)
    if surplus > 0:
        first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise InvalidInputError(left[0][1], "an image", "none: no message is the user's")
        counts[first] += surplus
    return [[left.pop(0) for _ in range(min(count, len(left)))] for count in counts]


def _places(message: Mapping[str, Any], placeholder: str) -> int:
    """Return how many images without a place of their own a message has places for."""
    if isinstance(message.get("content"), str):
        return str(message["content"]).count(placeholder)
    return sum(block.get("type") in _BLOCK_TYPES and _data(block) is None for block in _blocks(message))


def _filled(number: int, message: Dict, images: Sequence[Found], placeholder: str) -> list[Dict]:
    """Return the blocks of a message with ``images``, where an image is (image, name in errors)."""
    places = _places(message, placeholder)
    surplus = max(len(images) - places, 0)
    before = [_image_block(image) for image in images[:surplus]]
    placed = images[surplus:]
    if not isinstance(message.get("content"), str):
        return before + _filled_blocks(number, message, placed)
    if places > len(placed) and message["role"] == "user":
        _logger.warning("%d times %s and %d images: the others stay text", places, placeholder, len(placed))
    return before + (_cut_text(message["content"], placed, placeholder) if placed else _blocks(message))


def _filled_blocks(number: int, message: Dict, images: Sequence[Found]) -> list[Dict]:
    """Return the blocks of a message, with ``images`` in those that have none."""
    left = list(images)
    blocks: list[Dict] = []
    for place, block in enumerate(_blocks(message)):
        if block.get("type") not in _BLOCK_TYPES:
            blocks.append(block)
            continue
        field = f"messages[{number}].content[{place}]"
        _check_sees(message, field)
        value = _data(block)
        if value is None and not left:
            raise InvalidInputError(field, "an image block without an image", "one of " + ", ".join(_DATA_KEYS))
        blocks.append(_image_block(left.pop(0) if value is None else (value, field)))
    return blocks


def _cut_text(text: str, images: Sequence[Found], placeholder: str) -> list[Dict]:
    """Return a text as blocks, with ``images`` in the place of its first placeholders."""
    blocks: list[Dict] = []
    for image in images:
        before, _, text = text.partition(placeholder)
        blocks += [*_text_blocks(before), _image_block(image)]
    return blocks + _text_blocks(text)


def _check_sees(message: Mapping[str, Any], field: str) -> None:
    if message["role"] not in _SEE:
        raise InvalidInputError(field, f"an image of the {message['role']}", f"images of {' or '.join(_SEE)}")


def _image_block(image: Found) -> Dict:
    return {"type": "image", "image": image}


def _text_blocks(text: str) -> list[Dict]:
    return [{"type": "text", "text": text}] if text.strip() else []


def _standard(message: Dict, content: list[Dict], open_image: OpenImage) -> Dict:
    """Return a message with its images opened, or with one text if it has none."""
    message = {key: value for key, value in message.items() if key != "images"}
    if not any(block.get("type") == "image" for block in content):
        return plain_text({**message, "content": content} if content else message)
    opened = [
        {"type": "image", "image": open_image(*block["image"])} if block.get("type") == "image" else _text_block(block)
        for block in content
    ]
    return {**message, "content": opened}


def _text_block(block: Mapping[str, Any]) -> Dict:
    return {"type": "text", "text": plain_text({"content": [block]})["content"]}


def _blocks(message: Mapping[str, Any]) -> list[Dict]:
    """Return the blocks of a message's content, without keys that are None, which a table adds to its rows."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return [{"type": "text", "text": content}] if content else []
    blocks = (block for block in content if isinstance(block, Mapping))  # others: refuse_unread
    return [{key: value for key, value in block.items() if value is not None} for block in blocks]


def _data(block: Mapping[str, Any]) -> object:
    return next((block[key] for key in _DATA_KEYS if block.get(key) is not None), None)


def _listed(images: object) -> list[Any]:
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _unread(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what}: cannot be encoded; allowed: text and images")


class ImageEncoder:
    """What a vision model's images become in a row of tokens: image tokens, their positions, and patches."""

    def __init__(self, folder: Path, config: "PretrainedConfig", name: str) -> None:
        if config.model_type not in VISION_FAMILIES:
            known = ", ".join(sorted(VISION_FAMILIES))
            raise UnsupportedError(
                f"{name}: images of model_type {config.model_type} are not read; those of {known} are"
            )
        processing = ImageProcessing.from_folder(folder)
        if processing is None:
            raise UnsupportedError(f"{name} has no preprocessor_config.json, which says how images are resized")
        self.processing: ImageProcessing = processing
        self.token: int = config.image_token_id

    def add_images(self, row: Dict, images: Sequence[Any], source: ImageSource, *, decode: bool) -> Dict:
        """Return an encoded row with the tokens of its images in the place of one placeholder each, and their fields.

        ``images``: in RGB; or as files, if ``decode`` is False: then only headers are read, and no patches are made. A
        row that has all image tokens already is not expanded.
        """
        pixels: list[Any] = []
        sizes: list[ImageSize] = []
        for number, image in enumerate(images):
            if decode:
                seen = self.processing.resized_image(image, f"images[{number}]")
                pixels.append(self.processing.patches_of(seen))
                sizes.append(self.processing.size_seen(seen))
            else:
                sizes.append(self._size(image, source, f"images[{number}]"))
        ids: IntArray = np.asarray(row["input_ids"], np.int64)
        here = ids == self.token
        counts = np.ones(len(ids), np.int64)
        tokens = [size.tokens for size in sizes]
        if here.sum() == len(images):
            counts[here] = tokens
        elif here.sum() != sum(tokens):
            given = f"{here.sum()} image tokens in the text and {len(images)} images"
            raise InvalidInputError("messages", given, "one token each, which the chat template writes")
        merge = self.processing.merge
        added: Dict = {
            "input_ids": np.repeat(ids, counts),
            "mm_token_type_ids": np.repeat(here.astype(np.int64), counts),
            "image_grid_thw": np.array([(1, size.rows * merge, size.columns * merge) for size in sizes], np.int64),
        }
        if row.get("labels") is not None:
            added["labels"] = np.repeat(np.where(here, IGNORE, np.asarray(row["labels"], np.int64)), counts)
        return {**row, **added, **({"pixel_values": np.concatenate(pixels)} if decode else {})}

    def _size(self, image: "EncodedImage | PillowImage", source: ImageSource, field: str) -> ImageSize:
        if isinstance(image, EncodedImage):
            return self.processing.size_of(*read_size(image, field, source.limits), field)
        return self.processing.size_of(image.height, image.width, field)

    def types(self, row: Mapping[str, Any]) -> IntArray:
        """Return 1 for the tokens of images and 0 for text; without types in the row all image tokens are images'."""
        if row.get("mm_token_type_ids") is not None:
            return np.asarray(row["mm_token_type_ids"], np.int64).reshape(-1)
        return (np.asarray(row["input_ids"]).reshape(-1) == self.token).astype(np.int64)

    def places(self, row: Mapping[str, Any]) -> list[tuple[int, int, int]]:
        """Return the first token, the rows and the columns of each image of a row with ``image_grid_thw``."""
        field = "image_grid_thw"
        sizes = sizes_in_tokens(np.asarray(row[field]), self.processing.merge, field)
        firsts = first_tokens(np.flatnonzero(self.types(row) == 1), sizes, field)
        if len(firsts) != len(sizes):
            raise InvalidInputError(field, f"{len(sizes)} images", f"{len(firsts)}: what has image tokens")
        return [(first, *size) for first, size in zip(firsts, sizes, strict=True)]

    def positions(self, row: Mapping[str, Any]) -> IntArray:
        """Return the positions (4, 1, T) of a row's tokens: in the text, then time, row and column."""
        length = len(row["input_ids"])
        axes = position_axes(length, self.places(row))
        return np.concatenate([np.arange(length)[None], axes])[:, None]


class VisionProcessor:
    """The tokenizer and the image processor of a vision model, as ``Template.processor``.

    Transformers' own classes for both together also prepare videos, and need torchvision for that.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", processing: ImageProcessing, image_token: int) -> None:
        self.tokenizer = tokenizer
        self.image_processor = processing.processor
        self.image_token_id = image_token

    @cached_property
    def image_token(self) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(self.image_token_id))

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Call the tokenizer's method. An image becomes one image token."""
        return self.tokenizer.apply_chat_template(conversation, **options)

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return str(self.tokenizer.decode(token_ids, **options))

    def batch_decode(self, token_ids: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return [self.decode(ids, **options) for ids in token_ids]

    def save_pretrained(self, folder: str) -> None:
        """Write the files of the tokenizer and of the image processor."""
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)
