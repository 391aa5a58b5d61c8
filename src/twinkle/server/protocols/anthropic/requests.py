"""The bodies of Messages requests, and their conversion to the messages and tools that a chat template reads.

They are read as strictly as those of OpenAI's protocol: an unknown field is refused with its name, and so is one that
this server does not support, unless its value has no effect. A few fields are accepted and ignored, such as
``cache_control`` and ``metadata``.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from twinkle.errors import InvalidInputError
from twinkle.sampler.types import SamplingParams
from twinkle.server.protocols.openai.requests import Fields, MaxTokens, Name, neutral, text_content
from twinkle.server.wire.fields import MAX_STOP_LENGTH, MAX_STOPS, are_stop_texts, short

Turn = dict[str, Any]  # a message as a chat template reads it: role, content, tool_calls, tool_call_id
_TYPES = ("text", "image", "tool_use", "tool_result")
_BETWEEN = "\n\n"  # the texts of consecutive messages of one role
# The fields that a content block of each type must have.
_REQUIRED = {
    "text": ("text",),
    "image": ("source",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
# The types of blocks that a message of each role may have.
_ALLOWED = {"user": ("text", "image", "tool_result"), "assistant": ("text", "tool_use"), "system": ("text",)}


def _blocks(value: object) -> object:
    """Return the content of a message as a list of blocks. A text becomes one block. ValueError for other types."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, dict) else block
        if kind not in _TYPES:
            raise ValueError(f"allowed: blocks of type {', '.join(_TYPES)} (one is {short(kind)})")
    return value


def _stops(stops: list[str]) -> list[str]:
    if len(stops) > MAX_STOPS or not are_stop_texts([*stops]):
        raise ValueError(f"allowed: at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters")
    return stops


def _source(value: object) -> object:
    """Check the source of an image. ValueError for a URL or a stored file, which this server does not open."""
    if isinstance(value, dict) and value.get("type") != "base64":
        kind = value.get("type")
        raise ValueError(f"allowed: a source of type 'base64' (this one is {short(kind)}; the server opens no URL)")
    return value


class Source(Fields):
    """An image file as base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png"]
    data: str


class Block(Fields):
    """A part of a message's content. Which fields it has depends on its type."""

    type: Literal["text", "image", "tool_use", "tool_result"]
    text: str | None = None
    source: Annotated[Source, BeforeValidator(_source)] | None = None
    id: Annotated[str, Field(max_length=256)] | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=256)] | None = None
    content: Annotated[str, BeforeValidator(text_content)] = ""
    # Accepted and ignored:
    cache_control: Any = None
    caller: Any = None  # an earlier answer of another server, which a client sends back, may have it
    is_error: bool | None = None  # chat templates do not know it; the text of the result says what went wrong
    # Not supported:
    citations: Annotated[Any, AfterValidator(neutral([]))] = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        missing = [name for name in _REQUIRED[self.type] if vars(self)[name] is None]
        if missing:
            raise ValueError(f"allowed: a block of type {self.type!r} with the field {missing[0]!r}")
        for name, kind in (("text", "text"), ("source", "image")):
            if vars(self)[name] is not None and self.type != kind:
                raise ValueError(f"allowed: a block of type {self.type!r} without the field {name!r}")
        return self


class Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(fail_fast=True), BeforeValidator(_blocks)]

    def turns(self, where: str) -> list[Turn]:
        """Return the message as a chat template reads it: results of tools have a role of their own there.

        ``where``: the message's place in the request, for errors.
        """
        for number, block in enumerate(self.content):
            if block.type not in _ALLOWED[self.role]:
                allowed = f"{' or '.join(_ALLOWED[self.role])} in a message of role {self.role}"
                raise InvalidInputError(f"{where}.content[{number}].type", block.type, allowed)
        results = [
            {"role": "tool", "content": block.content, "tool_call_id": block.tool_use_id}
            for block in self.content
            if block.type == "tool_result"
        ]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if block.type == "tool_use"
        ]
        content = self._content()
        said = [{"role": self.role, "content": content, **({"tool_calls": calls} if calls else {})}]
        return [*results, *(said if content or calls or not results else [])]

    def _content(self) -> str | list[Turn]:
        """Return one text, or with images a list of blocks, which only templates of models that read images know."""
        shown = [block for block in self.content if block.type in ("text", "image")]
        if all(block.type == "text" for block in shown):
            return "".join(block.text or "" for block in shown)
        return [{"type": "image"} if block.text is None else _text_block(block.text) for block in shown]


class Tool(Fields):
    """A function that the model may call. Tools that a server runs itself have other types, and are refused."""

    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    type: Annotated[Any, AfterValidator(neutral("custom"))] = None
    # Accepted and ignored:
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    # Not supported:
    allowed_callers: Annotated[Any, AfterValidator(neutral(["direct"]))] = None
    defer_loading: Annotated[Any, AfterValidator(neutral(False))] = None
    input_examples: Annotated[Any, AfterValidator(neutral([]))] = None
    strict: Annotated[Any, AfterValidator(neutral(False))] = None

    def for_template(self) -> dict[str, object]:
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class ToolChoice(Fields):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: Annotated[Any, AfterValidator(neutral(False))] = None


class CountTokensRequest(Fields):
    """What determines the prompt."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    system: Annotated[str, BeforeValidator(text_content)] = ""
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    # Accepted and ignored:
    cache_control: Any = None
    # Not supported:
    thinking: Annotated[Any, AfterValidator(neutral({"type": "disabled"}))] = None
    output_config: Annotated[Any, AfterValidator(neutral({}))] = None
    speed: Annotated[Any, AfterValidator(neutral("standard"))] = None

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and (self.tool_choice is None or self.tool_choice.type != "none")

    @property
    def offered_tools(self) -> list[dict[str, object]]:
        """Return the tools as a chat template reads them."""
        return [tool.for_template() for tool in self.tools or ()] if self.offers_tools else []

    @property
    def image_uris(self) -> list[tuple[str, str]]:
        """Return all images as data URIs, in their order, each with the name of its field."""
        return [
            (
                f"data:{block.source.media_type};base64,{block.source.data}",
                f"messages[{number}].content[{place}].source",
            )
            for number, message in enumerate(self.messages)
            for place, block in enumerate(message.content)
            if block.source is not None
        ]

    def chat(self) -> list[Turn]:
        """Return the conversation as a chat template reads it. Consecutive messages of one role become one."""
        last = self.messages[-1].role
        if last == "assistant":
            raise InvalidInputError(
                f"messages[{len(self.messages) - 1}].role", last, "user: this server does not continue an answer"
            )
        turns = [{"role": "system", "content": self.system}] if self.system else []
        for number, message in enumerate(self.messages):
            turns += message.turns(f"messages[{number}]")
        # Results of tools have the role of a tool, and each stays a message of its own.
        grouped = groupby(enumerate(turns), lambda item: (item[1]["role"], item[0] if item[1]["role"] == "tool" else 0))
        return [_joined([turn for _, turn in group]) for _, group in grouped]

    # --- the rest of ``Wanted``. A request that only counts tokens generates nothing ----------------------------------

    @property
    def samples(self) -> int:
        return 1

    @property
    def top(self) -> int | None:
        return None

    @property
    def stop(self) -> Sequence[str]:
        return ()

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=1)


class MessagesRequest(CountTokensRequest):
    max_tokens: MaxTokens
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stop_sequences: Annotated[list[str], AfterValidator(_stops)] | None = None
    stream: bool | None = None
    # Accepted and ignored:
    metadata: dict[str, Any] | None = None
    # Not supported:
    container: Annotated[Any, AfterValidator(neutral())] = None
    diagnostics: Annotated[Any, AfterValidator(neutral())] = None
    inference_geo: Annotated[Any, AfterValidator(neutral())] = None
    service_tier: Annotated[Any, AfterValidator(neutral("auto", "standard_only"))] = None

    @property
    def stop(self) -> Sequence[str]:
        return tuple(self.stop_sequences or ())

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=-1 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop_strings=tuple(self.stop),
        )


def _text_block(text: str) -> Turn:
    return {"type": "text", "text": text}


def _joined(turns: Sequence[Turn]) -> Turn:
    """Return messages of one role as one, with an empty line between their texts."""
    contents = [turn["content"] for turn in turns if turn["content"]]
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    return {**turns[0], "content": _joined_contents(contents), **({"tool_calls": calls} if calls else {})}


def _joined_contents(contents: Sequence[str | list[Turn]]) -> str | list[Turn]:
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return _BETWEEN.join(texts)
    blocks: list[Turn] = []
    for content in contents:
        blocks += [_text_block(_BETWEEN)] if blocks else []
        blocks += [_text_block(content)] if isinstance(content, str) else content
    return blocks
