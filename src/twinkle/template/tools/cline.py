"""The format of Cline's prompt: a tag named after the tool, which holds one tag for each argument."""

import re

from twinkle.data_format import ToolCall
from twinkle.template.tools.parser import ToolCallParser, function_call
from twinkle.template.tools.scanning import Found, tagged, without

__all__ = ["ClineParser"]

_TOOL = r"[a-z][a-z0-9_]*"
_ARGUMENT = r"[A-Za-z_]\w*"
_RESULT = re.compile(r"\A\s*\[\w+ for '[^']*'\] Result:[ \t]*\n?")

# Tags that are not tool calls, although they contain other tags. Their contents are not searched either.
_CONVERSATION_TAGS = """think answer tool_call tool_response function parameter parameters tool tools system user
    assistant message messages content response output role reasoning_content"""
_HTML_TAGS = """a article aside b blockquote body button code dd details div dl dt em figure footer form h1 h2 h3 h4
    h5 h6 head header html i label li main nav ol option p pre script section select span strong style sub summary sup
    svg table tbody td tfoot th thead title tr u ul video audio"""
_NO_TOOLS = frozenset((_CONVERSATION_TAGS + " " + _HTML_TAGS).split())


class ClineParser(ToolCallParser):
    name = "cline"

    def detect(self, text: str) -> bool:
        return bool(self._matches(text))

    def parse(self, text: str) -> list[ToolCall]:
        calls = []
        for match in self._matches(text):
            arguments = {argument.name: argument.body.strip() for argument in tagged(match.body, _ARGUMENT)}
            calls.append(function_call(match.name, arguments))
        return calls

    def clean(self, text: str) -> str:
        return without(text, self._matches(text)).rstrip()

    def extract_tool_result(self, text: str) -> str | None:
        start = _RESULT.match(text)
        return text[start.end() :] if start else None

    def _matches(self, text: str) -> list[Found]:
        return [match for match in tagged(text, _TOOL) if match.name not in _NO_TOOLS and _has_argument(match.body)]


def _has_argument(body: str) -> bool:
    return next(tagged(body, _ARGUMENT), None) is not None
