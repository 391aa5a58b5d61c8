"""The format of the ReAct paper: a line ``Action: name[arguments]``."""

import re

from twinkle.data_format import ToolCall
from twinkle.template.tools.parser import ToolCallParser, function_call

__all__ = ["ReActParser"]

_ACTION = re.compile(r"^[ \t]*Action:[ \t]*([\w.-]+)\[(.*)\][ \t]*$", re.MULTILINE)


class ReActParser(ToolCallParser):
    name = "react"

    def detect(self, text: str) -> bool:
        return _ACTION.search(text) is not None

    def parse(self, text: str) -> list[ToolCall]:
        return [function_call(name, {"input": arguments}) for name, arguments in _ACTION.findall(text)]

    def clean(self, text: str) -> str:
        return _ACTION.sub("", text).rstrip()
