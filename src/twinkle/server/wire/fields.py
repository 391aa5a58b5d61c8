"""The building blocks of JSON requests: strict field types with their limits, and :func:`parse`."""

import json
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from twinkle.server.ids import CHECKPOINT_NAME
from twinkle.server.wire.errors import MalformedRequestError
from twinkle_client.protocol.verbs import only_keys_of

MAX_STOPS = 256
MAX_STOP_LENGTH = 1024  # characters; this much text is searched for a stop string after every token
_MAX_TTL = 3653 * 86400  # ten years, in seconds
_MAX_METADATA_ENTRIES = 256
_MAX_METADATA_BYTES = 16_384  # as JSON
_MAX_TAGS = 100
_MAX_TAGS_BYTES = 8192  # as JSON
_MAX_TOKEN_ID = 2**31 - 1
_TYPES_OF_UNIONS = ("float", "int", "str")
_MAX_PATH = 256  # characters of a field's path in an error


def _storable(text: str) -> str:
    if "\x00" in text:
        raise ValueError("allowed: text without NUL characters")
    return text


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        encoded = json.dumps(metadata, allow_nan=False)
    except ValueError:
        raise ValueError("allowed: finite numbers") from None
    if len(metadata) > _MAX_METADATA_ENTRIES or len(encoded) > _MAX_METADATA_BYTES:
        raise ValueError(f"allowed: {_MAX_METADATA_ENTRIES} entries, {_MAX_METADATA_BYTES} bytes of JSON in all")
    if "\\u0000" in encoded:
        raise ValueError("allowed: text without NUL characters")
    return metadata


def _small_tags(tags: list[str]) -> list[str]:
    if len(tags) > _MAX_TAGS or len(json.dumps(tags)) > _MAX_TAGS_BYTES:
        raise ValueError(f"allowed: {_MAX_TAGS} tags, {_MAX_TAGS_BYTES} bytes of JSON in all")
    return tags


def _checkpoint_name(name: str) -> str:
    if not CHECKPOINT_NAME.fullmatch(name):
        raise ValueError("allowed: up to 128 of A-Z a-z 0-9 . _ - and not a dot first (the server adds tinker://…)")
    return name


def are_token_ids(values: list[object]) -> bool:
    return all(type(value) is int and 0 <= value <= _MAX_TOKEN_ID for value in values)


def are_stop_texts(values: list[object]) -> bool:
    return all(isinstance(value, str) and 0 < len(value) <= MAX_STOP_LENGTH for value in values)


def _stops(value: object) -> object:
    """Return the stops as a list of texts or a list of token ids; a single text becomes a list of one."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if isinstance(stops, list) and len(stops) <= MAX_STOPS and (are_stop_texts(stops) or are_token_ids(stops)):
        return stops
    raise ValueError(
        f"allowed: null, a text, or at most {MAX_STOPS} texts or token ids; texts of 1 to {MAX_STOP_LENGTH} characters"
    )


Text = Annotated[str, AfterValidator(_storable), Field(max_length=4096)]
LongText = Annotated[str, AfterValidator(_storable), Field(max_length=65_536)]
Label = Annotated[str, AfterValidator(_storable), Field(max_length=256)]  # text that is stored with a session or run
Tags = Annotated[list[Label], AfterValidator(_small_tags)]
Id = Annotated[str, AfterValidator(_storable), Field(min_length=1, max_length=256)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
SequenceNumber = Annotated[int, Field(ge=1, lt=2**63)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
# Long lists stop at the first mistake: describing every one would take seconds and gigabytes.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Metadata = Annotated[dict[str, str], AfterValidator(_small)]
AnyMetadata = Annotated[dict[str, Any], AfterValidator(_small)]
TimeToLive = Annotated[int, Field(gt=0, le=_MAX_TTL)]
CheckpointName = Annotated[str, AfterValidator(_checkpoint_name)]
Stops = Annotated[list[str] | list[int] | None, BeforeValidator(_stops)]


class Request(BaseModel):
    """The base class of all requests. Types are strict; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Sequenced(Request):
    """A request with a sequence number of its model. The number is used up even if another field is wrong.

    None: the server numbers the request, as the next one of its model.
    """

    model_id: Id
    seq_id: SequenceNumber | None = None


class Parameters(BaseModel):
    """The base class of hyper-parameters, in which an unknown key is an error."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        unknown = sorted(set(value) - set(cls.model_fields)) if isinstance(value, dict) else []
        if unknown:
            raise ValueError(f"unknown key {short(unknown[0])}; known: {', '.join(sorted(cls.model_fields))}")
        return value


RequestT = TypeVar("RequestT", bound=BaseModel)
T = TypeVar("T")


def parse(request_type: type[RequestT], body: bytes) -> RequestT:
    """Parse the JSON body of a request; :class:`MalformedRequestError` for the first mistake."""
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        raise _malformed(error, request_type.model_fields) from None


def check(request_type: type[T], fields: object) -> T:
    """Check fields that have been parsed from JSON already; :class:`MalformedRequestError` for the first mistake.

    Keys that a dataclass does not have are refused.
    """
    try:
        read: T = adapter_of(request_type).validate_python(fields)
    except ValidationError as error:
        raise _malformed(error) from None
    return read


_adapters: dict[type[Any], TypeAdapter[Any]] = {}  # making one takes milliseconds


def adapter_of(request_type: type[Any]) -> TypeAdapter[Any]:
    """Return the pydantic adapter of a type, from a cache.

    Any thread may call this without a lock: at worst two threads make the same adapter.
    """
    if request_type not in _adapters:
        read_as: Any = request_type
        if is_dataclass(request_type):
            read_as = Annotated[request_type, BeforeValidator(only_keys_of(request_type))]
        _adapters[request_type] = TypeAdapter(read_as)
    return _adapters[request_type]


def _malformed(error: ValidationError, known: Iterable[str] = ()) -> MalformedRequestError:
    """Return an error for pydantic's first mistake.

    ``known``: the fields of the request, which the error lists where an unknown field is the mistake.
    """
    first = error.errors(include_url=False, include_context=False)[0]
    parts = first["loc"]
    if len(parts) > 1 and isinstance(parts[-2], int) and parts[-1] in _TYPES_OF_UNIONS:
        parts = parts[:-1]  # pydantic's name of the type that an item of a list might have had, no key of the client
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    path = path if len(path) <= _MAX_PATH else path[: _MAX_PATH - 1] + "…"  # keys may be as long as the body
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown field" + (f"; known: {', '.join(known)}" if len(first["loc"]) == 1 else "")
    elif first["type"] == "float_type" and first["input"] is None:
        message = "got null, allowed: a finite number (clients write NaN and infinity as null)"
    elif first["type"] not in ("missing", "json_invalid"):
        message = f"got {short(first['input'])}, {message}"
    return MalformedRequestError(f"{path or 'body'}: {message}", path, first["type"])


def short(value: object) -> str:
    """Return a value as at most 120 characters, for error messages."""
    text = repr(value[:120] if isinstance(value, str | list) else value)  # repr of a long value may take a second
    return text if len(text) <= 120 else text[:119] + "…"
