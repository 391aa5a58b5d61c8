"""``<<<[TOOL_REQUEST]>>>`` blocks with bracketed values, as VCPToolBox writes them."""

import re

from twinkle.data_format import ToolCall
from twinkle.template.tools.parser import ToolCallParser, function_call

__all__ = ["VCPParser"]

_BLOCK = re.compile(r"<<<\[TOOL_REQUEST\]>>>(.*?)<<<\[END_TOOL_REQUEST\]>>>", re.DOTALL)
# The second pair of brackets is for values that hold the first.
_FIELD = re.compile(r"([\w-]+)\s*[:：]\s*(?:「始ESCAPE」(.*?)「末ESCAPE」|「始」(.*?)「末」)", re.DOTALL)


class VCPParser(ToolCallParser):
    name = "vcp"
    open_marker = "<<<[TOOL_REQUEST]>>>"
    close_marker = "<<<[END_TOOL_REQUEST]>>>"

    def detect(self, text: str) -> bool:
        return self.open_marker in text

    def parse(self, text: str) -> list[ToolCall]:
        calls = []
        for block in _BLOCK.findall(text):
            fields = {key: (escaped or plain).strip() for key, escaped, plain in _FIELD.findall(block)}
            name = fields.pop("tool_name", "")
            if name:
                calls.append(function_call(name, fields))
        return calls

    def clean(self, text: str) -> str:
        return _BLOCK.sub("", text).rstrip()
