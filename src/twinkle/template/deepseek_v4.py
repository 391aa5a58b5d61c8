"""DeepSeek V4, which has a prompt format instead of a Jinja template."""

from typing import TYPE_CHECKING

from twinkle.data_format import ToolCall
from twinkle.template.chat_template import ChatRenderer
from twinkle.template.dsml import DSML_START, DsmlRenderer, clean_dsml, parse_dsml
from twinkle.template.template import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DeepseekV4Template"]


class DeepseekV4Template(Template):
    """A template that writes conversations and tool calls in DSML. Other formats of tool calls can still be parsed."""

    def _load_tokenizer(self) -> "PreTrainedTokenizerBase":
        from twinkle.template.dsml import DsmlTokenizer

        return DsmlTokenizer.from_pretrained(self._folder, local_files_only=True)

    def _chat_template(self, with_tools: bool) -> ChatRenderer:
        return DsmlRenderer()

    def parse(self, text: str) -> list[ToolCall]:
        return parse_dsml(text)

    def clean(self, text: str) -> str:
        return clean_dsml(text)

    def parse_tool_call(self, text: str) -> list[ToolCall]:
        return parse_dsml(text) if DSML_START in text else super().parse_tool_call(text)

    def clean_tool_call(self, text: str) -> str:
        return clean_dsml(text) if DSML_START in text else super().clean_tool_call(text)
