"""The prompt format of DeepSeek V4: fixed rules instead of a Jinja template, and tool calls in its own tags (DSML).

A conversation is BOS, system texts, then turns of the user and the assistant. A user's turn begins with ``<｜User｜>``;
tool results are part of it, between ``<tool_result>`` tags. An assistant's turn begins with ``<｜Assistant｜>`` and
either ``<think>`` (the assistant thinks, and ends its thought with ``</think>``) or ``</think>`` (it does not think).
Thoughts before the last user turn are dropped, unless there are tools or ``drop_thinking`` is false. The wording of the
tools' introduction is ours; tags and layout are the model's.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from twinkle.data_format import ToolCall
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.template.chat_template import Rendered, RenderMessage, Span
from twinkle.template.messages import conversation as checked_messages
from twinkle.template.messages import renderable
from twinkle.template.tools.scanning import Found, between, without

__all__ = ["DSML_START", "DsmlRenderer", "DsmlTokenizer", "clean_dsml", "parse_dsml"]

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML_START, DSML_END = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"

_TOOLS = f"""## Tools

These tools can be called. A call is written as a block of this form:

{DSML_START}
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
{DSML_END}

A text is given as it is, with string="true"; any other value is given as JSON, with string="false".

### Tool schemas

"""
_MAX_EFFORT = (
    "Reasoning effort: maximum. Examine every step, every alternative and every edge case before you answer.\n\n"
)

_INVOKE, _INVOKE_END = re.compile(r'<｜DSML｜invoke name="([^"]*)">'), "</｜DSML｜invoke>"
_PARAMETER = re.compile(r'<｜DSML｜parameter name="([^"]*)" string="(true|false)">')
_PARAMETER_END = "</｜DSML｜parameter>"
_ANY_TAG = re.compile(r"</?｜DSML｜")

_EFFORTS = (None, "high", "max")
_VARIABLES = ("drop_thinking", "enable_thinking", "reasoning_effort", "thinking")


def parse_dsml(text: str) -> list[ToolCall]:
    """Return the tool calls in a text, or none at all if anything in them is malformed."""
    calls: list[ToolCall] = []
    for block in between(text, DSML_START, DSML_END):
        invokes = list(_invokes(block.body))
        for invoke in invokes:
            parameters = list(_parameters(invoke.body))
            try:
                arguments = {each.name: each.body if is_text else json.loads(each.body) for each, is_text in parameters}
            except (ValueError, RecursionError):
                return []
            if without(invoke.body, [each for each, _ in parameters]).strip():
                return []
            calls.append({"type": "function", "function": {"name": invoke.name, "arguments": arguments}})
        if without(block.body, invokes).strip():
            return []
    return calls


def clean_dsml(text: str) -> str:
    """Return the text without its tool calls, and without the white space before them."""
    kept, position = [], 0
    for block in between(text, DSML_START, DSML_END):
        kept.append(text[position : block.start].rstrip())
        position = block.end
    return ("".join(kept) + text[position:]).rstrip()


def _invokes(block: str) -> Iterator[Found]:
    position = 0
    while (opening := _INVOKE.search(block, position)) is not None:
        end = block.find(_INVOKE_END, opening.end())
        if end < 0:
            return
        position = end + len(_INVOKE_END)
        yield Found(opening.start(), position, opening[1], block[opening.end() : end])


def _parameters(body: str) -> Iterator[tuple[Found, bool]]:
    """Yield each parameter, and whether its value is plain text (not JSON). A value contains no tags."""
    position = 0
    while (opening := _PARAMETER.search(body, position)) is not None:
        tag = _ANY_TAG.search(body, opening.end())
        if tag is None:
            return
        if body.startswith(_PARAMETER_END, tag.start()):
            position = tag.start() + len(_PARAMETER_END)
            found = Found(opening.start(), position, opening[1], body[opening.end() : tag.start()])
            yield found, opening[2] == "true"
        else:
            position = opening.start() + 1


@dataclass(frozen=True)
class _Mode:
    thinking: bool
    drop_thinking: bool
    effort: str | None


@dataclass
class _Turn:
    """A turn in the model's format. Consecutive tool results and user messages form one turn of the user."""

    role: str
    parts: list[str] = field(default_factory=list)
    message: RenderMessage = field(default_factory=dict)
    number: int = -1


@dataclass
class _Writer:
    text: str = ""
    spans: list[Span] = field(default_factory=list)


class DsmlRenderer:
    """Renders conversations in DSML.

    Variables: ``enable_thinking`` or ``thinking``, ``reasoning_effort`` (None, 'high', 'max'), ``drop_thinking``.
    """

    reasoning_fields = frozenset({"reasoning_content"})

    def render(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = False,
    ) -> str:
        return self._write(messages, tools, variables, add_generation_prompt).text

    def render_turns(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> Rendered:
        written = self._write(messages, tools, variables, add_generation_prompt=False)
        return Rendered(written.text, written.spans)

    def _write(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> _Writer:
        mode = _mode(variables, bool(tools))
        turns = _turns(messages)
        users = [index for index, turn in enumerate(turns) if turn.role == "user"]
        last_user = users[-1] if users else -1
        writer = _Writer(BOS + (_MAX_EFFORT if mode.thinking and mode.effort == "max" else ""))
        if tools:
            schemas = (json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
            writer.text += "\n\n" + _TOOLS + "\n".join(schemas) + "\n"
        for index, turn in enumerate(turns):
            thinks = mode.thinking and (not mode.drop_thinking or index >= last_user)
            following = turns[index + 1].role if index + 1 < len(turns) else None
            prompts = following == "assistant" or (following is None and add_generation_prompt)
            if turn.role == "assistant":
                start = len(writer.text)
                writer.text += _assistant(turn.message, thinks)
                writer.spans.append(Span(turn.number, start, len(writer.text)))
            else:
                writer.text += (USER if turn.role == "user" else "") + "\n\n".join(turn.parts)
            if turn.role == "user" and prompts:
                writer.text += ASSISTANT + (THINK if thinks else END_THINK)
        return writer


def _mode(variables: Mapping[str, Any], has_tools: bool) -> _Mode:
    for name in variables:
        if name not in _VARIABLES:
            raise UnknownNameError("chat template variable", name, _VARIABLES)
    effort = variables.get("reasoning_effort")
    if effort not in _EFFORTS:
        raise InvalidInputError("reasoning_effort", effort, "None, 'high' or 'max'")
    thinking = bool(variables.get("thinking", variables.get("enable_thinking", True)))
    return _Mode(thinking, bool(variables.get("drop_thinking", True)) and not has_tools, effort)


def _turns(messages: Sequence[RenderMessage]) -> list[_Turn]:
    turns: list[_Turn] = []
    for number, message in enumerate(_in_order_of_calls(messages)):
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            turns.append(_Turn("assistant", message=message, number=number))
        elif role == "system":
            turns.append(_Turn("system", [content]))
        elif role in ("user", "tool"):
            if not turns or turns[-1].role != "user":
                turns.append(_Turn("user"))
            turns[-1].parts.append(content if role == "user" else f"<tool_result>{content}</tool_result>")
        else:
            raise InvalidInputError("role", role, "system, user, assistant, tool")
    return turns


def _in_order_of_calls(messages: Sequence[RenderMessage]) -> list[RenderMessage]:
    """Return the messages with consecutive tool results sorted in the order of their calls."""
    ordered: list[RenderMessage] = []
    position: dict[str, int] = {}
    results: list[RenderMessage] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        ordered += sorted(results, key=lambda result: position.get(result.get("tool_call_id", ""), 0))
        results = []
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or []
            position = {call["id"]: index for index, call in enumerate(calls) if call.get("id")}
        ordered.append(message)
    return ordered + sorted(results, key=lambda result: position.get(result.get("tool_call_id", ""), 0))


def _assistant(message: RenderMessage, thinks: bool) -> str:
    thought = (message.get("reasoning_content") or "") + END_THINK if thinks else ""
    calls = message.get("tool_calls") or []
    block = "\n\n" + "\n".join([DSML_START, *map(_invoke, calls), DSML_END]) if calls else ""
    return thought + (message.get("content") or "") + block + EOS


def _invoke(call: Mapping[str, Any]) -> str:
    function = call["function"]
    lines = [f'<｜DSML｜invoke name="{function["name"]}">']
    for key, value in function["arguments"].items():
        is_text = isinstance(value, str)
        written = value if is_text else json.dumps(value, ensure_ascii=False)
        lines.append(f'<｜DSML｜parameter name="{key}" string="{str(is_text).lower()}">{written}</｜DSML｜parameter>')
    return "\n".join([*lines, "</｜DSML｜invoke>"])


class DsmlTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # Transformers is not type checked
    """A fast tokenizer whose chat template is DSML instead of Jinja."""

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: str | None = None,
        **variables: Any,
    ) -> Any:
        """Return the text, its token ids, or a dict of token ids and mask, as Transformers' method does.

        variables: see :class:`DsmlRenderer`.
        """
        renderer = DsmlRenderer()
        messages = checked_messages({"messages": list(conversation)})
        shown = [renderable(message, renderer.reasoning_fields) for message in messages]
        text = renderer.render(shown, tools, variables, add_generation_prompt)
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False, return_tensors=return_tensors)
        return encoded if return_dict else encoded["input_ids"]
