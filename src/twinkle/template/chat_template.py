"""A Hugging Face chat template: renders messages to text, and tells which parts of the text the assistant wrote.

A model learns from an assistant's turn exactly what it would have to generate: all text that its message was rendered
to (see :mod:`twinkle.template.turn_markers`), except the header that a generation prompt provides. The end-of-turn
token and any text of the message after it are included.

The header is found once for each template, by rendering short conversations. It is the generation prompt itself if the
turn starts with it; else the common beginning of all generation prompts and turns of the template (thinking may be
switched off in the prompt and present in the turn); else the text before the answer in a turn. A template with
``{% generation %}`` blocks marks itself what to learn, and needs no header.
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

# Names that templates use for the assistant's thinking; the first is the usual one.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

_PROBE_TEXTS = ("ⓐ", "ⓑ")


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``end`` of a rendered text that are learnt. They belong to message number ``message``."""

    message: int
    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: list[Span]


class ChatRenderer(Protocol):
    """Renders messages to text and knows which parts of it the assistant wrote."""

    @property
    def reasoning_fields(self) -> frozenset[str]:
        """Return the message keys from which it reads an assistant's thinking; empty if it only reads the content."""
        ...

    def render(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the conversation as text."""
        ...

    def render_turns(
        self,
        messages: Sequence[RenderMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> Rendered:
        """Return the conversation as text, and the parts of it that the assistant wrote."""
        ...


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template. ``special_tokens``: the tokenizer's, which templates use by name (``bos_token`` …).

    The object holds only text, so that it can be pickled; compiled templates are cached elsewhere.
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
        except (TemplateError, TypeError) as error:  # raise_exception, a missing key, None instead of text
            raise InvalidInputError("messages", conversation, f"what the chat template accepts: {error}") from error
        return split_markers(marked, len(conversation))


@dataclass(frozen=True)
class _Compiled:
    template: "jinja2.Template"
    marks_generation: bool
    reasoning_fields: frozenset[str]


@lru_cache(maxsize=64)
def _compiled(source: str) -> _Compiled:
    """Compile a template with the functions that Hugging Face documents, and with the calls that mark turns."""
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
        """The block ``{% generation %}…{% endgeneration %}``, which prints its body between two markers."""

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
    """Return the JSON text of a value. Jinja's own filter escapes < and & for HTML pages, which templates must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _read_names(tree: "nodes.Template") -> set[str]:
    """Return every attribute and text constant of the template: ``message.x``, ``message['x']``, ``'x' in message``."""
    from jinja2 import nodes

    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    return attributes | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}


@lru_cache(maxsize=256)
def _headers(template: ChatTemplate, variables_json: str) -> tuple[str, ...]:
    """Return the possible headers of an assistant's turn, in order of preference."""
    variables = json.loads(variables_json)
    opposite = {**variables, "enable_thinking": not variables.get("enable_thinking", True)}
    prompt = _generation_prompt(template, variables)
    before_text = _before_text(template, variables)
    prompts = [text for text in (prompt, _generation_prompt(template, opposite)) if text.strip()]
    everywhere = _common_start(prompts + before_text)
    candidates = [prompt, everywhere, *sorted(before_text, key=len, reverse=True)]
    # White space alone is not a header: templates without one print a space before the answer, and this space belongs
    # to the answer's first token.
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
    """Return the text before an assistant's answer, in an earlier turn and in the last one."""
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
        if region.owner == 0:  # the template may print a preamble before the header of the first message
            found = text.find(header, region.start, region.end)
            if found >= 0:
                return found + len(header) - region.start
    return 0
