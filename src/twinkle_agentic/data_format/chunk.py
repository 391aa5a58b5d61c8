"""A conversation as a list of chunks, and the way back to a trajectory.

A chunk is a piece of one message: a text, a medium, the assistant's reasoning, or a tool call. Chunkers make chunks,
condensers replace the text of some by a shorter one, and :meth:`Chunks.to_trajectory` makes messages of them again.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

from twinkle.data_format import Message, Trajectory
from twinkle.errors import InvalidInputError

__all__ = ["Chunk", "Chunks", "RawChunk", "chunks_of_messages", "condensed_blocks"]

_MEDIA: dict[Literal["image", "video", "audio"], Literal["images", "videos", "audios"]] = {
    "image": "images",
    "video": "videos",
    "audio": "audios",
}


class RawChunk(TypedDict, total=False):
    """What a chunk's content alone does not say.

    ``kind``: the field of the message that the chunk comes from, if that is not its content. ``tool_call``: the call
    of a chunk of that kind. ``block``: the content block of a medium. ``list``: the message's list that a medium comes
    from (``images`` …). ``message``: the number of a tool message, which keeps the answers of two tools apart.
    ``condensed``: the content is a condenser's, and ``original`` is the text that it replaces.
    """

    kind: Literal["reasoning_content", "tool_call"]
    tool_call_id: str
    tool_call: dict[str, Any]
    block: dict[str, Any]
    list: Literal["images", "videos", "audios"]
    message: int
    condensed: bool
    original: str


class Chunk(TypedDict, total=False):
    """One piece of a message. ``content`` is text, or a medium as the message holds it.

    ``round`` is 0 before the first user message and goes up by one at each user message.
    """

    type: Literal["text", "image", "video", "audio"]
    content: Any
    raw: RawChunk
    role: str
    round: int


@dataclass
class Chunks:
    """The chunks of one conversation, in order."""

    chunks: list[Chunk]

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.chunks)

    def __getitem__(self, index: int) -> Chunk:
        return self.chunks[index]

    def blocks(self) -> dict[int, Chunk]:
        """Return the condensed chunks by the number that :meth:`to_trajectory` writes around their texts."""
        return condensed_blocks(self.chunks)

    def to_trajectory(self, block_wrapper: tuple[str, str] = ("<block_{n}>", "</block_{n}>")) -> Trajectory:
        """Return a trajectory with the messages of these chunks and, if there are any, its images, videos and audios.

        Chunks of equal role in a row become one message, in which a blank line separates the texts. Answers of
        different tool calls stay different messages. A condensed text that is not a tool's stands in
        ``block_wrapper``, in which ``{n}`` is replaced by its number: 1 for the first one of the conversation.
        Media that a chunker took from the trajectory's own lists, which have no ``raw``, go back there.
        """
        numbers = {id(chunk): number for number, chunk in self.blocks().items()}
        messages: list[Message] = []
        media: dict[str, list[Any]] = {}
        last: tuple[object, ...] | None = None
        for chunk in self.chunks:
            if _type(chunk) != "text" and not chunk.get("raw"):
                media.setdefault(_medium_list(chunk), []).append(chunk["content"])
                continue
            owner = _message_key(chunk)
            if owner != last:
                messages.append(_new_message(chunk))
                last = owner
            number = numbers.get(id(chunk))
            marks = ("", "") if number is None else block_wrapper
            opening, closing = (mark.replace("{n}", str(number)) for mark in marks)
            _append(messages[-1], chunk, opening, closing)
        trajectory: dict[str, Any] = {"messages": messages, **media}
        return Trajectory(**trajectory)  # type: ignore[typeddict-item]


def condensed_blocks(chunks: Iterable[Chunk]) -> dict[int, Chunk]:
    """Return the condensed chunks by the number N of their ``<block_N>``: from 1, without those of tools."""
    return dict(enumerate(filter(_is_block, chunks), start=1))


def chunks_of_messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[Chunk]:
    """Yield the chunks of messages without splitting any text: reasoning, then contents, media and tool calls."""
    turn = 0
    for number, message in enumerate(messages):
        role = str(message.get("role", ""))
        turn += role == "user"
        own: RawChunk = {}
        if role == "tool":
            own["message"] = number
            if message.get("tool_call_id") is not None:
                own["tool_call_id"] = message["tool_call_id"]
        for chunk in _pieces(message):
            raw: RawChunk = {**own, **(chunk.get("raw") or {})}
            yield {**chunk, "role": role, "round": turn, **({"raw": raw} if raw else {})}


def _pieces(message: Mapping[str, Any]) -> Iterator[Chunk]:
    if message.get("reasoning_content"):
        yield {"type": "text", "content": message["reasoning_content"], "raw": {"kind": "reasoning_content"}}
    content = message.get("content")
    blocks = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    calls = message.get("tool_calls") or []
    for block in blocks:
        if not isinstance(block, Mapping) or block.get("type") not in {"text", *_MEDIA}:
            raise InvalidInputError("content", block, f"a block of the type text, {', '.join(_MEDIA)}")
        if block["type"] != "text":
            medium = cast('Literal["image", "video", "audio"]', block["type"])
            yield {"type": medium, "content": _medium(block), "raw": {"block": dict(block)}}
        elif block["text"] or not (calls or message.get("reasoning_content")):  # an empty message stays a message
            yield {"type": "text", "content": block["text"]}
    for kind, name in _MEDIA.items():
        for value in message.get(name) or []:
            yield {"type": kind, "content": value, "raw": {"list": name}}
    for call in calls:
        raw: RawChunk = {"kind": "tool_call", "tool_call": deepcopy(dict(call))}
        if call.get("id") is not None:
            raw["tool_call_id"] = call["id"]
        yield {"type": "text", "content": json.dumps(call.get("function"), ensure_ascii=False), "raw": raw}


def _medium(block: Mapping[str, Any]) -> Any:
    names = (block["type"], "url", "path")
    return next((block[name] for name in names if name in block), None)


def _medium_list(chunk: Chunk) -> str:
    medium = chunk.get("type")
    if medium not in _MEDIA:
        raise InvalidInputError("type", medium, f"text, {', '.join(_MEDIA)}")
    return _MEDIA[medium]


def _type(chunk: Chunk) -> str:
    return chunk.get("type", "text")


def _is_block(chunk: Chunk) -> bool:
    raw = chunk.get("raw") or {}
    is_tool = chunk.get("role") == "tool" or raw.get("kind") == "tool_call"
    return _type(chunk) == "text" and bool(raw.get("condensed")) and not is_tool


def _message_key(chunk: Chunk) -> tuple[object, ...]:
    """Return what is equal for the chunks of one message."""
    role, raw = chunk.get("role"), (chunk.get("raw") or {})
    return (role, raw.get("tool_call_id"), raw.get("message")) if role == "tool" else (role,)


def _new_message(chunk: Chunk) -> Message:
    message: dict[str, Any] = {"role": chunk.get("role", "user"), "content": ""}
    if chunk.get("role") == "tool" and (chunk.get("raw") or {}).get("tool_call_id") is not None:
        message["tool_call_id"] = chunk["raw"]["tool_call_id"]
    return Message(**message)  # type: ignore[typeddict-item]


def _append(message: Message, chunk: Chunk, opening: str, closing: str) -> None:
    raw = chunk.get("raw") or {}
    if raw.get("kind") == "tool_call":
        call = raw.get("tool_call") or {
            "id": raw.get("tool_call_id", ""),
            "type": "function",
            "function": json.loads(chunk["content"]),
        }
        message.setdefault("tool_calls", []).append(deepcopy(call))  # type: ignore[arg-type]
        return
    if "list" in raw:
        message.setdefault(raw["list"], []).append(chunk["content"])
        return
    if _type(chunk) != "text":
        block = dict(raw.get("block") or {"type": chunk["type"], chunk["type"]: chunk["content"]})
        message["content"] = [*_blocks(message["content"]), block]
        return
    text = f"{opening}{chunk['content']}{closing}"
    if raw.get("kind") == "reasoning_content":
        message["reasoning_content"] = _joined(message.get("reasoning_content", ""), text)
    elif isinstance(message["content"], str):
        message["content"] = _joined(message["content"], text)
    elif message["content"][-1].get("type") == "text":
        message["content"][-1]["text"] = _joined(message["content"][-1]["text"], text)
    else:
        message["content"].append({"type": "text", "text": text})


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _joined(first: str, second: str) -> str:
    """Return two texts with one blank line between them, also where a chunker has left line breaks at a cut."""
    return f"{first.rstrip(chr(10))}\n\n{second.lstrip(chr(10))}" if first else second
