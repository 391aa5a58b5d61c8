"""One message of a conversation, and the tools that an assistant may call."""

from typing import Any, Literal, TypedDict

__all__ = ["Function", "FunctionCall", "Message", "Tool", "ToolCall"]


class FunctionCall(TypedDict, total=False):
    """The function that a tool call names. ``arguments``: a dict, or its JSON text, as in the OpenAI API."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict, total=False):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Function(TypedDict, total=False):
    """The description of a function. ``parameters`` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]


class Tool(TypedDict, total=False):
    type: Literal["function"]
    function: Function


class Message(TypedDict, total=False):
    """One message.

    ``content`` is text, or a list of blocks ``{"type": "text", "text": …}`` and ``{"type": "image" | "video" | "audio",
    …}``. A media block holds its data under the name of its type, ``url`` or ``path``. ``images``, ``videos`` and
    ``audios`` belong to placeholders in the text. (Our templates refuse media so far.) ``reasoning_content`` is the
    assistant's thinking before its answer, without the tags around it.
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
