"""One form for conversations of many agents: roles, tool calls and tool messages as in OpenAI's API.

Searches go forward through a text with ``str.find``, so that their time grows with its length and not faster.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle.data_format import user_data_get
from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.utils import (
    Message,
    Result,
    Row,
    Rows,
    append_to_text,
    has_media,
    has_valid_messages,
    reasoning_of,
    rewrite_rows,
    text_of,
    thoughts_and_answer,
    tool_calls_of,
)

__all__ = ["MessageNormalizer", "is_heartbeat"]

_HEARTBEAT = re.compile(r"\W{0,4}heart-?beat(?: (?:check|poll|ping))?\W{0,4}", re.IGNORECASE)
_HEARTBEAT_NAMES = ("heartbeat_ok", "heartbeat.md")

_CLINE_TOOLS = (
    "access_mcp_resource|apply_diff|ask_followup_question|attempt_completion|browser_action|execute_command|"
    "insert_content|list_code_definition_names|list_files|load_mcp_documentation|new_task|plan_mode_respond|"
    "read_file|replace_in_file|search_files|switch_mode|use_mcp_tool|write_to_file"
)
_CLINE_OPEN = re.compile(rf"<({_CLINE_TOOLS})>")
_CLINE_FIELD = re.compile(r"<([A-Za-z_]{1,40})>")
_CLINE_RESULT = re.compile(rf"\[(?:{_CLINE_TOOLS})\b[^\]\n]{{0,500}}\] Result:\s?")
_REACT_LINE = re.compile(r"^[ \t]{0,8}(Thought|Action Input|Action|Observation|Final Answer)[ \t]{0,8}:", re.MULTILINE)
_VCP_OPEN, _VCP_CLOSE = "<<<[TOOL_REQUEST]>>>", "<<<[END_TOOL_REQUEST]>>>"
_VCP_RESULT = "[[VCP调用结果信息汇总"


class MessageNormalizer:
    """Rewrites the messages of each row into one form; never drops a row.

    - Heartbeat rounds (an agent's clock asks, and the assistant says HEARTBEAT_OK) are taken out.
    - The role ``developer`` becomes ``system``.
    - Calls inside an assistant's text become ``tool_calls``, and their results ``tool`` messages. Four forms are known:
      Cline (``<read_file><path>…``), ReAct (``Action: …``), VCP (``<<<[TOOL_REQUEST]>>>``) and Hermes
      (``<tool_call>{…}``).
    - Neighbouring messages of the same role become one; tool messages stay apart.

    A row without valid messages is returned unchanged. A row whose ``user_data`` has ``key_rounds`` is refused if its
    messages would move: run this step before IntentClassifier.
    """

    def __call__(self, rows: Rows) -> Result:
        return rewrite_rows(rows, self._normalized)

    def _normalized(self, row: Row) -> Row:
        if not has_valid_messages(row):
            return row
        messages = _without_heartbeats(row["messages"])
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        messages = _merged(_CallReader().read(messages))
        if len(messages) != len(row["messages"]) and user_data_get(row.get("user_data"), "key_rounds"):
            raise InvalidInputError(
                "user_data", "key_rounds", "none here: run MessageNormalizer before IntentClassifier"
            )
        return {**row, "messages": messages}


def is_heartbeat(text: str) -> bool:
    """Return whether a user's text is nothing but a heartbeat, or asks for the answer HEARTBEAT_OK."""
    return _HEARTBEAT.fullmatch(text.strip()) is not None or _HEARTBEAT_NAMES[0] in text.lower()


def _without_heartbeats(messages: Iterable[Message]) -> list[Message]:
    kept: list[Message] = []
    for round_ in _rounds(messages):
        if not _is_heartbeat_round(round_):
            kept += round_
    return kept


def _rounds(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Yield the messages before the first user's message, then each user's message with those that follow it."""
    current: list[Message] = []
    for message in messages:
        if message["role"] == "user" and current:
            yield current
            current = []
        current.append(message)
    if current:
        yield current


def _is_heartbeat_round(messages: list[Message]) -> bool:
    if messages[0]["role"] != "user":
        return False
    asked = text_of(messages[0])
    if _HEARTBEAT.fullmatch(asked.strip()):
        return True
    if not any(name in asked.lower() for name in _HEARTBEAT_NAMES):
        return False
    answers = [thoughts_and_answer(each)[1] for each in messages[1:] if each["role"] == "assistant"]
    return bool(answers) and "HEARTBEAT_OK" in answers[-1][:200]  # a heartbeat that led to work stays


# --- calls inside texts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True)
class _Observed:
    text: str


_Part = str | _Call | _Observed


@dataclass
class _CallReader:
    """Replaces calls inside texts, message by message. ``_open``: the ids of calls that have no result yet."""

    _open: deque[str] = field(default_factory=deque)
    _count: int = 0
    _made: list[Message] = field(default_factory=list)

    def read(self, messages: Iterable[Message]) -> list[Message]:
        for message in messages:
            if message["role"] == "assistant":
                self._open.clear()
                self._assistant(message)
            elif self._open and message["role"] in ("user", "tool"):
                self._answer(message)
            else:
                self._made.append(message)
        return self._made

    def _assistant(self, message: Message) -> None:
        text = text_of(message)
        if tool_calls_of(message) or has_media(message) or not text:
            self._made.append(message)
            return
        head, body = _after_thoughts(text)
        parts = _parts(body)
        if not any(isinstance(part, _Call) for part in parts):
            self._made.append(message)
            return
        current: Message | None = {**message, "content": head.strip()}
        for part in parts:
            if isinstance(part, _Observed):
                if current is not None:
                    self._made.append(current)
                    current = None
                self._tool(part.text)
                continue
            current = current or {"role": "assistant", "content": ""}
            current = self._with_call(current, part) if isinstance(part, _Call) else _with_text(current, part)
        if current is not None and (text_of(current) or tool_calls_of(current)):
            self._made.append(current)

    def _with_call(self, message: Message, call: _Call) -> Message:
        self._count += 1
        name = f"call_{self._count}"
        self._open.append(name)
        made = {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        return {**message, "tool_calls": [*tool_calls_of(message), made]}

    def _answer(self, message: Message) -> None:
        """Turn results in a message of the user or of a tool into tool messages. Further text stays with the user."""
        text = text_of(message)
        results, rest = _results(text)
        if message["role"] == "tool":
            self._tool("\n".join(results) if results and not rest else text, message)
            return
        if not results or len(results) > len(self._open):
            self._made.append(message)
            return
        for result in results:
            self._tool(result)
        if rest or has_media(message):
            self._made.append({**message, "content": rest})

    def _tool(self, text: str, message: Message | None = None) -> None:
        answered = {"tool_call_id": self._open.popleft()} if self._open else {}
        self._made.append({**(message or {}), "role": "tool", **answered, "content": text})


def _after_thoughts(text: str) -> tuple[str, str]:
    """Return the text up to the end of its last thought, where no calls are read, and the text behind it.

    A thought without an end reaches to the end of the text, and nothing of such a text is searched for calls.
    """
    end = text.rfind("</think>")
    if end >= 0:
        end += len("</think>")
        return text[:end], text[end:]
    return (text, "") if "<think>" in text else ("", text)


def _parts(text: str) -> list[_Part]:
    """Return the text cut into plain text, calls and results, by the first form that finds a call."""
    for cut in (_hermes, _vcp, _cline, _react):
        parts = cut(text)
        if any(isinstance(part, _Call) for part in parts):
            return [part for part in parts if not isinstance(part, str) or part.strip()]
    return [text]


def _blocks(text: str, opening: str, closing: str) -> Iterator[tuple[str, str]]:
    """Yield ("text", …) and ("block", …) in turn. A block that is not closed is text."""
    place = 0
    while (start := text.find(opening, place)) >= 0 and (end := text.find(closing, start)) >= 0:
        yield "text", text[place:start]
        yield "block", text[start + len(opening) : end]
        place = end + len(closing)
    yield "text", text[place:]


def _hermes(text: str) -> list[_Part]:
    parts: list[_Part] = []
    for kind, piece in _blocks(text, "<tool_call>", "</tool_call>"):
        call = _json_call(piece) if kind == "block" else None
        if call is not None:
            parts.append(call)
        else:
            parts.append(piece if kind == "text" else f"<tool_call>{piece}</tool_call>")
    return parts


def _json_call(text: str) -> _Call | None:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return _Call(
        value["name"],
        _arguments(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)),
    )


def _vcp(text: str) -> list[_Part]:
    parts: list[_Part] = []
    for kind, piece in _blocks(text, _VCP_OPEN, _VCP_CLOSE):
        fields = dict(_vcp_fields(piece)) if kind == "block" else {}
        name = fields.pop("tool_name", "")
        if name:
            fields.pop("maid", None)  # who asks
            parts.append(_Call(name, json.dumps(fields, ensure_ascii=False)))
        else:
            parts.append(piece if kind == "text" else f"{_VCP_OPEN}{piece}{_VCP_CLOSE}")
    return parts


def _vcp_fields(block: str) -> Iterator[tuple[str, str]]:
    """Yield the fields ``name:「始」value「末」`` of a block."""
    place = 0
    while (start := block.find("「始」", place)) >= 0 and (end := block.find("「末」", start)) >= 0:
        yield block[place:start].strip(" \t\r\n,，:："), block[start + 3 : end].strip()
        place = end + 3


def _cline(text: str) -> list[_Part]:
    parts: list[_Part] = []
    place = 0
    while (opened := _CLINE_OPEN.search(text, place)) is not None:
        closing = f"</{opened[1]}>"
        end = text.find(closing, opened.end())
        if end < 0:
            break
        parts.append(text[place : opened.start()])
        fields = dict(_cline_fields(text[opened.end() : end]))
        if opened[1] == "attempt_completion":  # the agent's final answer, which is text
            parts.append(fields.get("result", ""))
        else:
            parts.append(_Call(opened[1], json.dumps(fields, ensure_ascii=False)))
        place = end + len(closing)
    return [*parts, text[place:]]


def _cline_fields(block: str) -> Iterator[tuple[str, str]]:
    place = 0
    while (opened := _CLINE_FIELD.search(block, place)) is not None:
        closing = f"</{opened[1]}>"
        end = block.find(closing, opened.end())
        if end < 0:
            return
        yield opened[1], block[opened.end() : end].strip()
        place = end + len(closing)


def _react(text: str) -> list[_Part]:
    """Cut a text at its lines ``Thought:``, ``Action:``, ``Action Input:``, ``Observation:`` and ``Final Answer:``."""
    marks = list(_REACT_LINE.finditer(text))
    if not any(mark[1] == "Action" for mark in marks):
        return [text]
    parts: list[_Part] = [text[: marks[0].start()].strip()]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    name: str | None = None
    for mark, end in zip(marks, ends, strict=True):
        said = text[mark.end() : end].strip()
        if mark[1] != "Action Input" and name:  # an action without input
            parts.append(_Call(name, "{}"))
            name = None
        if mark[1] == "Action":
            name = said
        elif mark[1] == "Action Input":
            parts.append(_Call(name, _arguments(said)) if name else said)
            name = None
        else:
            parts.append(_Observed(said) if mark[1] == "Observation" else said)
    return [*parts, _Call(name, "{}")] if name else parts


def _arguments(text: str) -> str:
    """Return the JSON text of an object: the text itself, or an object that holds it as ``input``."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        value = None
    return text if isinstance(value, dict) else json.dumps({"input": text}, ensure_ascii=False)


def _results(text: str) -> tuple[list[str], str]:
    """Return the results of calls in a message, and the text beside them."""
    if "<tool_response>" in text:
        pieces = list(_blocks(text, "<tool_response>", "</tool_response>"))
        rest = "".join(piece for kind, piece in pieces if kind == "text")
        return [piece.strip() for kind, piece in pieces if kind == "block"], rest.strip()
    stripped = text.strip()
    if stripped.startswith(_VCP_RESULT):
        return [stripped], ""
    if stripped.startswith("Observation:"):
        return [stripped.removeprefix("Observation:").strip()], ""
    if (headed := _CLINE_RESULT.match(stripped)) is not None:
        return [stripped[headed.end() :].strip()], ""
    return [], stripped


# --- equal roles ------------------------------------------------------------------------------------------------------


def _with_text(message: Message, text: str) -> Message:
    return append_to_text(message, text.strip()) if text.strip() else message


def _merged(messages: Iterable[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] != "tool":
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _joined(first: Message, second: Message) -> Message:
    joined: dict[str, Any] = {**first, "content": _joined_content(first.get("content"), second.get("content"))}
    calls = [*tool_calls_of(first), *tool_calls_of(second)]
    if calls:
        joined["tool_calls"] = calls
    for key in ("images", "videos", "audios"):
        if second.get(key):
            joined[key] = [*(first.get(key) or []), *second[key]]
    thoughts = [reasoning_of(each) for each in (first, second) if reasoning_of(each)]
    if thoughts:
        joined["reasoning_content"] = "\n\n".join(thoughts)
    return joined


def _joined_content(first: Any, second: Any) -> Any:
    if isinstance(first, list | tuple) or isinstance(second, list | tuple):
        return [*_as_list(first), *_as_list(second)]
    return "\n\n".join(text for text in (first, second) if text)


def _as_list(content: Any) -> list[Any]:
    if isinstance(content, list | tuple):
        return list(content)
    return [{"type": "text", "text": content}] if content else []
