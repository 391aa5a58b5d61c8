"""A tag named after the tool with one tag for each argument in it, as Cline's prompt asks for."""

import re

from twinkle.data_format import ToolCall
from twinkle.template.tools.parser import ToolCallParser, function_call

__all__ = ["ClineParser"]

_OUTER = re.compile(r"<([a-z][a-z0-9_]*)>(.*?)</\1>", re.DOTALL)
_INNER = re.compile(r"<([A-Za-z_]\w*)>(.*?)</\1>", re.DOTALL)
_RESULT = re.compile(r"\A\s*\[\w+ for '[^']*'\] Result:[ \t]*\n?")

# Tags with an inside of their own that call nothing. What stands in them is not looked at either.
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
            arguments = {key: value.strip() for key, value in _INNER.findall(match[2])}
            calls.append(function_call(match[1], arguments))
        return calls

    def clean(self, text: str) -> str:
        for match in reversed(self._matches(text)):
            text = text[: match.start()] + text[match.end() :]
        return text.rstrip()

    def extract_tool_result(self, text: str) -> str | None:
        start = _RESULT.match(text)
        return text[start.end() :] if start else None

    def _matches(self, text: str) -> list[re.Match[str]]:
        return [match for match in _OUTER.finditer(text) if match[1] not in _NO_TOOLS and _INNER.search(match[2])]
