"""A Hugging Face chat template: messages in, text out, and in it the parts that the assistant said.

What is learnt of an assistant's turn is what it would have to generate: everything that its message became (see
:mod:`twinkle.template.turn_markers`) behind the header that a generation prompt provides; the end-of-turn token and
what follows it in that message are included. The header is found once for a template, by rendering short conversations
with it: the generation prompt itself where the turn starts with it, else what all generation prompts and turns of the
template have in common (thinking may be switched off in the prompt and present in the turn), else what stands before
the text of a turn. A template with ``{% generation %}`` blocks says itself what to learn, and nothing of this applies.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.template.turn_markers import (
    GENERATION,
    MARKING_FILTERS,
    TRACKER,
    Region,
    TurnTracker,
    mark_loops,
    marker_node,
    split_markers,
)

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes

__all__ = ["ChatRenderer", "ChatTemplate", "Rendered", "Span"]

RenderMessage = dict[str, Any]

# What templates call the assistant's thinking; the first is the usual name.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

_PROBE_TEXTS = ("ⓐ", "ⓑ")


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``end`` of a rendered text are to be learnt; message number ``message`` said them."""

    message: int
    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: list[Span]


class ChatRenderer(Protocol):
    """Whatever turns messages into text and knows where in it the assistant speaks."""

    @property
    def reasoning_fields(self) -> frozenset[str]:
        """The names under which it reads an assistant's thinking; empty if it only reads the text."""
        ...

    def render(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text."""
        ...

    def render_turns(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> Rendered:
        """The conversation as text, and where in it the assistant speaks."""
        ...


@dataclass(frozen=True)
class ChatTemplate:
    """``special_tokens`` are the tokenizer's, which templates know by name (``bos_token`` …).

    Only texts are kept here, and what is compiled from them is cached elsewhere, so that it can be pickled.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...]

    @property
    def reasoning_fields(self) -> frozenset[str]:
        return _compiled(self.source).reasoning_fields

    def render(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = False,
    ) -> str:
        text, _ = self._regions(messages, tools, variables, add_generation_prompt)
        return text

    def render_turns(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> Rendered:
        text, regions = self._regions(messages, tools, variables, add_generation_prompt=False)
        if _compiled(self.source).marks_generation:
            return Rendered(text, [Span(part.owner, part.start, part.end) for part in regions if part.generated])
        headers = _headers(self, json.dumps(dict(variables), sort_keys=True))
        spans = []
        for part in regions:
            if part.owner >= 0 and messages[part.owner].get("role") == "assistant":
                spans.append(Span(part.owner, part.start + _header_length(text, part, headers), part.end))
        return Rendered(text, spans)

    def _regions(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> tuple[str, list[Region]]:
        from jinja2 import TemplateError

        conversation = list(messages)
        try:
            marked = _compiled(self.source).template.render(
                {
                    **dict(self.special_tokens),
                    **variables,
                    "messages": conversation,
                    "tools": tools or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    TRACKER: TurnTracker(conversation),
                }
            )
        except (TemplateError, TypeError) as error:  # raise_exception, a missing key, None where text belongs
            raise InvalidInputError("messages", conversation, f"what the chat template accepts: {error}") from error
        return split_markers(marked, len(conversation))


@dataclass(frozen=True)
class _Compiled:
    template: "jinja2.Template"
    marks_generation: bool
    reasoning_fields: frozenset[str]


@lru_cache(maxsize=64)
def _compiled(source: str) -> _Compiled:
    """Compile with what the Hugging Face documentation promises to templates, and with the calls that mark turns."""
    from jinja2 import TemplateSyntaxError, nodes

    environment = _environment()
    try:
        tree = environment.parse(source)
    except TemplateSyntaxError as error:
        raise InvalidInputError("chat_template", source, f"a Jinja template: {error}") from error
    marks_generation = any(node.name == GENERATION for node in tree.find_all(nodes.Filter))
    fields = _read_names(tree) & set(REASONING_FIELDS)
    mark_loops(tree)
    tree.set_environment(environment)
    code = environment.compile(tree)
    template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    return _Compiled(template, marks_generation, frozenset(fields))


def _environment() -> "jinja2.Environment":
    from jinja2 import TemplateError, ext, nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(ext.Extension):
        """``{% generation %}…{% endgeneration %}``: prints its body between two markers."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Parser) -> "nodes.Scope":
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin = marker_node(GENERATION, [nodes.Const(True)], line)
            end = marker_node(GENERATION, [nodes.Const(False)], line)
            return nodes.Scope([begin, *body, end], lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, ext.loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, **MARKING_FILTERS}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter writes JSON for HTML pages: it escapes < and &."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _read_names(tree: "nodes.Template") -> set[str]:
    """Every attribute and text constant in the template: ``message.x``, ``message['x']``, ``'x' in message``."""
    from jinja2 import nodes

    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    return attributes | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}


@lru_cache(maxsize=256)
def _headers(template: ChatTemplate, variables_json: str) -> tuple[str, ...]:
    """What may stand before an assistant's words and is given to it, in the order in which it is looked for."""
    variables = json.loads(variables_json)
    opposite = {**variables, "enable_thinking": not variables.get("enable_thinking", True)}
    prompt = _generation_prompt(template, variables)
    before_text = _before_text(template, variables)
    prompts = [text for text in (prompt, _generation_prompt(template, opposite)) if text.strip()]
    everywhere = _common_start(prompts + before_text)
    candidates = [prompt, everywhere, *sorted(before_text, key=len, reverse=True)]
    # White space is no header: templates without one print a space before the answer, which begins its first token.
    return tuple(dict.fromkeys(text for text in candidates if text.strip()))


def _generation_prompt(template: ChatTemplate, variables: Mapping[str, Any]) -> str:
    question = [{"role": "user", "content": "?"}]
    without = template.render(question, None, variables)
    prompted = template.render(question, None, variables, add_generation_prompt=True)
    return prompted[len(_common_start([without, prompted])) :]


def _common_start(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    for index, character in enumerate(shortest):
        if any(text[index] != character for text in texts):
            return shortest[:index]
    return shortest


def _before_text(template: ChatTemplate, variables: Mapping[str, Any]) -> list[str]:
    """What stands before the text of an assistant's turn, of an earlier turn and of the last one."""
    probe: list[RenderMessage] = []
    for text in _PROBE_TEXTS:
        probe += [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, "reasoning_content": ""}]
    text, regions = template._regions(probe, None, variables, add_generation_prompt=False)
    before = []
    for owner, sentinel in zip((1, 3), _PROBE_TEXTS, strict=True):
        turns = [text[part.start : part.end] for part in regions if part.owner == owner]
        found = [turn.partition(sentinel)[0] for turn in turns if sentinel in turn]
        if len(found) != 1:
            raise UnsupportedError(
                "chat_template: cannot tell which part of the text is the assistant's, because the template does not "
                "loop over `messages`; mark that part with {% generation %} … {% endgeneration %}"
            )
        before += found
    return before


def _header_length(text: str, region: Region, headers: Iterable[str]) -> int:
    for header in headers:
        if text.startswith(header, region.start, region.end):
            return len(header)
        if region.owner == 0:  # a preamble that the template prints with the first message, whoever sent that
            found = text.find(header, region.start, region.end)
            if found >= 0:
                return found + len(header) - region.start
    return 0
