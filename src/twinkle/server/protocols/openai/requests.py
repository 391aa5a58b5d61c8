"""The bodies of chat and text completion requests.

They are read strictly: a field that is unknown is refused with its name, and so is one that this server does not
support, unless its value has no effect. A few fields are accepted and ignored.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from twinkle.errors import InvalidInputError
from twinkle.sampler.types import SamplingParams
from twinkle.server.wire.errors import BodyTooLargeError
from twinkle.server.wire.fields import (
    MAX_STOP_LENGTH,
    Metadata,
    Request,
    Seed,
    are_stop_texts,
    are_token_ids,
    short,
)


class Fields(Request):
    """The base class of all parts of a request. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


def neutral(*values: object) -> Callable[[object], object]:
    """Return a validator for a field that is not supported: only null and ``values``, which have no effect, pass."""

    def check(value: object) -> object:
        if value is not None and value not in values:
            allowed = " or ".join(["null", *(repr(each) for each in values)])
            raise ValueError(f"allowed: {allowed} (this server does not offer it)")
        return value

    return check


Name = Annotated[str, Field(min_length=1, max_length=256)]


def text_content(value: object) -> object:
    """Return the text of a message, which may be null or a list of text parts. ValueError for other parts."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"allowed: parts of type 'text' (one is {short(kind)})")
    return "".join(part["text"] for part in value)


class ImageUrl(Fields):
    """An image as a data URI. A model sees all images at its own resolution, so ``detail`` cannot be low."""

    url: str
    detail: Annotated[Any, AfterValidator(neutral("auto", "high"))] = None


class Part(Fields):
    """A part of a message: text, or an image."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.text is None) is (self.type == "text") or (self.image_url is None) is (self.type == "image_url"):
            raise ValueError(f"allowed: a part of type {self.type!r} with the field {self.type!r} alone")
        return self


def _parts(value: object) -> object:
    """Return the content of a message as a list of parts. A text becomes one part. ValueError for other types."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("allowed: a text, or a list of parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in ("text", "image_url"):
            raise ValueError(f"allowed: parts of type 'text' or 'image_url' (one is {short(kind)})")
    return value


def _arguments(value: object) -> object:
    """Return the arguments, JSON text, as a dict, which templates need. Text that UTF-8 cannot encode is refused."""
    try:
        arguments = json.loads(value) if isinstance(value, str) else None
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("allowed: the text of a JSON object")
    return arguments


class CalledFunction(Fields):
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class CalledTool(Fields):
    """A call that the assistant made in an earlier turn."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # clients that assemble a message from streamed parts leave it in


class Message(Fields):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Annotated[list[Part], Field(fail_fast=True), BeforeValidator(_parts)] = []  # noqa: RUF012 - never changed
    name: Name | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    # Clients send an earlier answer of this server back with these fields, which are empty:
    annotations: Annotated[Any, AfterValidator(neutral([]))] = None
    audio: Annotated[Any, AfterValidator(neutral())] = None
    function_call: Annotated[Any, AfterValidator(neutral())] = None
    refusal: Annotated[Any, AfterValidator(neutral())] = None

    def for_template(self) -> dict[str, object]:
        """Return the message for the chat template, which calls the role ``developer`` by its older name ``system``."""
        read = self.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
        read["content"] = self._content()
        if self.role == "developer":
            read["role"] = "system"
        if self.tool_calls:
            read["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        return read

    def _content(self) -> str | list[dict[str, object]]:
        """Return one text, or with images a list of blocks, which only templates of models that read images know."""
        if all(part.image_url is None for part in self.content):
            return "".join(part.text or "" for part in self.content)
        return [
            {"type": "image"} if part.text is None else {"type": "text", "text": part.text} for part in self.content
        ]

    def image_uris(self, where: str) -> list[tuple[str, str]]:
        """Return the images as they were sent, each with the name of its field. Only a user may send some."""
        found = []
        for number, part in enumerate(self.content):
            if part.image_url is not None:
                field = f"{where}.content[{number}]"
                if self.role != "user":
                    raise InvalidInputError(f"{field}.type", part.type, f"'text' in a message of role {self.role}")
                found.append((part.image_url.url, f"{field}.image_url"))
        return found


class OfferedFunction(Fields):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[Any, AfterValidator(neutral(False))] = None


class Tool(Fields):
    """A function that the assistant may call."""

    function: OfferedFunction
    type: Literal["function"]

    def for_template(self) -> dict[str, object]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


MAX_SAMPLES = 128
MAX_PROMPTS = 256
MAX_TOP_LOGPROBS = 20
_MAX_STOPS = 4
_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for a text completion

Prompt = str | list[int]
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
ClientText = Annotated[str, Field(max_length=4096)]


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not are_stop_texts(stops):
        raise ValueError(f"allowed: null, or at most {_MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and are_token_ids(value)


def _prompts(value: object) -> list[Prompt]:
    """Return the prompts of a request; a single prompt becomes a list of one."""
    prompts = [value] if isinstance(value, str) or _is_tokens(value) else value
    if isinstance(prompts, list) and 0 < len(prompts) <= MAX_PROMPTS:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) == len(prompts) or all(_is_tokens(prompt) for prompt in prompts):
            return prompts
    raise ValueError(f"allowed: a text, a list of token ids, or up to {MAX_PROMPTS} of either kind")


class StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, AfterValidator(neutral(False))] = None


CHAT_BYTES = 32 * 2**20  # of a chat with images; the largest image file has 27 MiB as base64
TEXT_BYTES = 4 * 2**20  # of a chat without its images, or of prompts


class HasImages(Protocol):
    """A request with a chat, which may have images."""

    @property
    def image_uris(self) -> Sequence[tuple[str, str]]:
        """Return all images as they were sent, in their order, each with the name of its field."""


ChatT = TypeVar("ChatT", bound=HasImages)


def read_chat(read: Callable[[bytes], ChatT], body: bytes) -> ChatT:
    """Return ``read(body)``, the request in the body of a chat. Only its images may be large.

    A body with more values than a small one can have is refused before it is parsed, which blocks all other threads.
    """
    if len(body) <= TEXT_BYTES:
        return read(body)
    if body.count(b",") > TEXT_BYTES:
        raise BodyTooLargeError(TEXT_BYTES, "commas")
    chat = read(body)
    if len(body) - sum(len(uri) for uri, _ in chat.image_uris) > TEXT_BYTES:
        raise BodyTooLargeError(TEXT_BYTES, "bytes without its images")
    return chat


class GenerationFields(Fields):
    """The fields that chat and text completion requests share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # an extension: OpenAI does not have it
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None  # this and the next two are extensions that vLLM has
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted and ignored:
    user: ClientText | None = None
    metadata: Metadata | None = None
    # Not supported:
    logit_bias: Annotated[Any, AfterValidator(neutral({}))] = None

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit(self) -> int | None:
        """Return the most tokens of a sample; None: up to the end of the context."""
        raise NotImplementedError

    @property
    def top(self) -> int | None:
        """Return how many likeliest tokens to list at each position; None: no log-probabilities are requested."""
        raise NotImplementedError

    @property
    def params(self) -> SamplingParams:
        if self.top_k == 0:
            raise InvalidInputError("top_k", 0, "-1 (off) or at least 1")
        return SamplingParams(
            max_tokens=self.limit,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=-1 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop_strings=self.stop,
            stop_at_eos=not self.ignore_eos,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
        )


class ChatRequest(GenerationFields):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    # Accepted and ignored:
    prompt_cache_key: ClientText | None = None
    safety_identifier: ClientText | None = None
    # Not supported:
    audio: Annotated[Any, AfterValidator(neutral())] = None
    function_call: Annotated[Any, AfterValidator(neutral("none"))] = None
    functions: Annotated[Any, AfterValidator(neutral([]))] = None
    modalities: Annotated[Any, AfterValidator(neutral(["text"]))] = None
    parallel_tool_calls: Annotated[Any, AfterValidator(neutral(True))] = None
    prediction: Annotated[Any, AfterValidator(neutral())] = None
    reasoning_effort: Annotated[Any, AfterValidator(neutral())] = None
    response_format: Annotated[Any, AfterValidator(neutral({"type": "text"}))] = None
    service_tier: Annotated[Any, AfterValidator(neutral("auto", "default"))] = None
    store: Annotated[Any, AfterValidator(neutral(False))] = None
    verbosity: Annotated[Any, AfterValidator(neutral())] = None
    web_search_options: Annotated[Any, AfterValidator(neutral())] = None

    @property
    def image_uris(self) -> list[tuple[str, str]]:
        of_messages = (each.image_uris(f"messages[{number}]") for number, each in enumerate(self.messages))
        return [image for images in of_messages for image in images]

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tools is None or self.tool_choice == "none" else self.tools

    @property
    def top(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidInputError("top_logprobs", self.top_logprobs, "null unless logprobs is true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidInputError("max_tokens", self.max_tokens, "null beside max_completion_tokens: one of the two")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationFields):
    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    # Not supported:
    best_of: Annotated[Any, AfterValidator(neutral(1))] = None
    echo: Annotated[Any, AfterValidator(neutral(False))] = None
    suffix: Annotated[Any, AfterValidator(neutral(""))] = None

    @property
    def limit(self) -> int:
        return self.max_tokens or _COMPLETION_TOKENS

    @property
    def top(self) -> int | None:
        return self.logprobs
