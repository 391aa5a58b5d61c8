"""One turn of a conversation, and the tools that an assistant may call in it."""

from typing import Any, Literal, TypedDict

__all__ = ["Function", "FunctionCall", "Message", "Tool", "ToolCall"]


class FunctionCall(TypedDict, total=False):
    """``arguments``: a dict, or the JSON text of one, as the OpenAI API has it."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict, total=False):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Function(TypedDict, total=False):
    """``parameters`` is the JSON schema of the arguments."""

    name: str
    description: str
    parameters: dict[str, Any]


class Tool(TypedDict, total=False):
    type: Literal["function"]
    function: Function


class Message(TypedDict, total=False):
    """``content``: text, or blocks ``{"type": "text", "text": …}`` and ``{"type": "image" | "video" | "audio", …}``.

    The data of a media block stands under its type's name, ``url`` or ``path``; ``images``, ``videos`` and ``audios``
    beside the content fill placeholders in the text. ``reasoning_content`` is what the assistant thought before it
    answered, without the tags around it.
    """

    role: Literal["system", "user", "assistant", "tool"]
    type: str
    content: str | list[dict[str, Any]]
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning_content: str
    images: list[Any]
    videos: list[Any]
    audios: list[Any]
