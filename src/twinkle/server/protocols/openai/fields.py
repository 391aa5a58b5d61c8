"""Reading requests of this protocol: strict, and a field that is unknown or not offered is named in the refusal."""

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from twinkle.server.protocols.openai.errors import RequestError
from twinkle.server.wire.fields import short

_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


class Fields(BaseModel):
    """What all parts of a request have in common."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


FieldsT = TypeVar("FieldsT", bound=Fields)


def parse(request_type: type[FieldsT], body: bytes) -> FieldsT:
    """Read a request, or raise :class:`RequestError` with the first thing that is wrong."""
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, request_type) from None


def neutral(*values: object) -> Callable[[object], object]:
    """For fields that are not offered here: null and ``values`` ask for nothing, all else is refused."""

    def check(value: object) -> object:
        if value is not None and value not in values:
            allowed = " or ".join(["null", *(repr(each) for each in values)])
            raise ValueError(f"allowed: {allowed} (this server does not offer it)")
        return value

    return check


def _refusal(error: ValidationError, request_type: type[Fields]) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = f"; known: {', '.join(request_type.model_fields)}" if len(first["loc"]) == 1 else ""
        message = f"unknown field{known}"
    elif first["type"] not in ("missing", "json_invalid"):
        message = f"got {short(first['input'])}, {message}"
    return RequestError(f"{path or 'body'}: {message}", path or None, _CODES.get(first["type"], "invalid_value"))
