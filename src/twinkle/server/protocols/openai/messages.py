"""Conversations as clients send them, and as chat templates read them."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from twinkle.server.protocols.openai.fields import Fields, neutral
from twinkle.server.wire.fields import short

Name = Annotated[str, Field(min_length=1, max_length=256)]


def _content(value: object) -> object:
    """A text, or parts of one."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"allowed: parts of type 'text' (one is {short(kind)}; the models here read text only)")
    return "".join(part["text"] for part in value)


def _arguments(value: object) -> object:
    """Templates want what the text means, and the tokenizer what can be written as UTF-8."""
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
    index: int | None = None  # left in by those who put streamed pieces together


class Message(Fields):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content)] = ""
    name: Name | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    # An answer of ours comes back with these, empty:
    annotations: Annotated[Any, AfterValidator(neutral([]))] = None
    audio: Annotated[Any, AfterValidator(neutral())] = None
    function_call: Annotated[Any, AfterValidator(neutral())] = None
    refusal: Annotated[Any, AfterValidator(neutral())] = None

    def for_template(self) -> dict[str, object]:
        """``developer`` is a newer name for ``system`` that templates do not know."""
        read: dict[str, object] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.name is not None:
            read["name"] = self.name
        if self.tool_calls:
            read["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        if self.tool_call_id is not None:
            read["tool_call_id"] = self.tool_call_id
        return read


class OfferedFunction(Fields):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[Any, AfterValidator(neutral(False))] = None


class Tool(Fields):
    """A function that the assistant may ask for."""

    function: OfferedFunction
    type: Literal["function"]

    def for_template(self) -> dict[str, object]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}
