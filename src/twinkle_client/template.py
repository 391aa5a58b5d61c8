"""Templates on the server, which encode and decode without a tokenizer on the client's machine."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from twinkle_client.client.images import rows_with_images
from twinkle_client.client.session import TwinkleClient
from twinkle_client.compatibility import PATHS, missing
from twinkle_client.hub import load_tokenizer
from twinkle_client.remote import RemoteObject, id_text, is_folder, model_name

__all__ = ["DeepseekV4Template", "Qwen2_5VLTemplate", "Qwen3Template", "Qwen3_5Template", "Template"]

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


class Template(RemoteObject):
    """The chat template of a model's tokenizer, with the options of the library's class.

    A folder of this machine as ``model_id`` means the model that the server serves under the folder's last name.
    """

    processor_type: ClassVar[str] = "template"
    parameters: ClassVar[tuple[str, ...]] = (
        "model_id",
        "use_chat_template",
        "max_length",
        "truncation_strategy",
        "default_system",
        "enable_thinking",
    )

    def __init__(self, *arguments: Any, client: TwinkleClient | None = None, **options: Any) -> None:
        super().__init__(*arguments, client=client, **options)
        self.model_id = str(id_text(self.options.get("model_id", "")))
        if is_folder(self.model_id):
            self.options["model_id"] = model_name(self.model_id)

    @cached_property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer, loaded on this machine: see :func:`twinkle_client.hub.load_tokenizer`."""
        return load_tokenizer(self.model_id)

    def encode(
        self,
        trajectory: Mapping[str, Any],
        add_generation_prompt: bool = False,
        *,
        tokenize: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Row:
        how = _how(add_generation_prompt, tokenize, chat_template_kwargs)
        row: Row = self.call("encode", trajectory=rows_with_images(trajectory), **how)
        return row

    def batch_encode(
        self,
        trajectories: Rows,
        add_generation_prompt: bool = False,
        *,
        tokenize: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Row]:
        how = _how(add_generation_prompt, tokenize, chat_template_kwargs)
        rows: list[Row] = self.call("batch_encode", trajectories=rows_with_images(trajectories), **how)
        return rows

    def concat_input_feature(self, feature: Mapping[str, Any], new_tokens: Sequence[int]) -> Row:
        """Return a prompt's feature with sampled tokens appended and labelled."""
        joined: Row = self.call("concat_input_feature", feature=feature, new_tokens=new_tokens)
        return joined

    def check(self, trajectory: Mapping[str, Any]) -> Row | None:
        """Return the trajectory if it can be encoded to at least one token, else None."""
        checked: Row | None = self.call("check", trajectory=rows_with_images(trajectory))
        return checked

    def batch_check(self, trajectories: Rows) -> list[Row | None]:
        checked: list[Row | None] = self.call("batch_check", trajectories=rows_with_images(trajectories))
        return checked

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.call("decode", token_ids=token_ids, skip_special_tokens=skip_special_tokens))

    def batch_decode(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        texts: list[str] = self.call("batch_decode", token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return texts

    def parse_tool_call(self, text: str) -> list[Row]:
        calls: list[Row] = self.call("parse_tool_call", text=text)
        return calls

    def clean_tool_call(self, text: str) -> str:
        """Return the text without its tool calls."""
        return str(self.call("clean_tool_call", text=text))


class DeepseekV4Template(Template):
    pass


class Qwen2_5VLTemplate(Template):  # noqa: N801  # the library's name
    pass


class Qwen3Template(Template):
    pass


class Qwen3_5Template(Template):  # noqa: N801  # the library's name
    pass


def template_named(name: str, options: Mapping[str, Any], client: TwinkleClient) -> Template:
    """Return the template of this class name, which the server knows; it is made there when it is first used."""
    template = Template(client=client, **options)
    template.class_type = name
    return template


def _how(add_generation_prompt: bool, tokenize: bool, chat_template_kwargs: Mapping[str, Any] | None) -> Row:
    """Return the arguments of encoding, without those that have the library's default, which servers may not know."""
    how: Row = {"add_generation_prompt": add_generation_prompt}
    if not tokenize:
        how["tokenize"] = tokenize
    if chat_template_kwargs is not None:
        how["chat_template_kwargs"] = chat_template_kwargs
    return how


def __getattr__(name: str) -> object:
    raise missing(PATHS, __name__, name)
