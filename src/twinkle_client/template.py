"""Templates on the server, which encode and decode without a tokenizer on the client's machine."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from twinkle_client.remote import RemoteObject

__all__ = ["DeepseekV4Template", "Qwen3Template", "Qwen3_5Template", "Template"]

Row = dict[str, Any]


class Template(RemoteObject):
    """The chat template of a model's tokenizer, with the options of the library's class."""

    processor_type: ClassVar[str] = "template"
    parameters: ClassVar[tuple[str, ...]] = (
        "model_id",
        "use_chat_template",
        "max_length",
        "truncation_strategy",
        "default_system",
        "enable_thinking",
    )

    def encode(self, trajectory: Mapping[str, Any], add_generation_prompt: bool = False) -> Row:
        row: Row = self.call("encode", trajectory=trajectory, add_generation_prompt=add_generation_prompt)
        return row

    def batch_encode(self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> list[Row]:
        rows: list[Row] = self.call(
            "batch_encode", trajectories=trajectories, add_generation_prompt=add_generation_prompt
        )
        return rows

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.call("decode", token_ids=token_ids, skip_special_tokens=skip_special_tokens))

    def batch_decode(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        texts: list[str] = self.call("batch_decode", token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return texts

    def parse_tool_call(self, text: str) -> list[Row]:
        calls: list[Row] = self.call("parse_tool_call", text=text)
        return calls


class DeepseekV4Template(Template):
    pass


class Qwen3Template(Template):
    pass


class Qwen3_5Template(Template):  # noqa: N801  # the library's name
    pass
