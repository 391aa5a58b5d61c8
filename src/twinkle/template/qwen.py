"""Templates of the Qwen family.

Their chat templates are changed in two places, so that the text of a conversation does not change when more messages
are appended, as rollouts with tools require. The chat templates of other models are used unchanged.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle.template.template import Template

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = ["Qwen2_5VLTemplate", "Qwen3Template", "Qwen3_5Template"]

Row = dict[str, Any]

_REPLACED = {
    # Qwen3 writes an empty thought only into the last turn, so that turn would change once a tool has answered.
    "loop.last or (not loop.last and reasoning_content)": "true",
    # Qwen3.5 refuses a conversation without a user's question, such as a tool's answer alone.
    "{{- raise_exception('No user query found in messages.') }}": "",
}


class Qwen3Template(Template):
    """The template of Qwen3: with thinking, and tool calls in ``<tool_call>``."""

    def _load_tokenizer(self) -> "PreTrainedTokenizerBase":
        return _with_steady_history(super()._load_tokenizer())


class Qwen2_5VLTemplate(Template):  # noqa: N801 (the form of the other names)
    """The template of Qwen2.5-VL: positions have four axes also for text, and vLLM's prompts one token an image."""

    def set_mm_position_ids(self, feature: Row) -> Row:
        """Add ``position_ids`` (4, 1, T): in the text, then time, row and column; for text all are equal."""
        return _with_four_axes(super().set_mm_position_ids(feature), self.config)

    def get_vllm_input_ids(self, input_ids: Sequence[int]) -> Sequence[int]:
        """Replace every run of image tokens by a single one, which vLLM expands itself."""
        return _one_pad_each(input_ids, self.tokenizer.get_added_vocab())


class Qwen3_5Template(Template):  # noqa: N801 (the name that scripts use)
    """The template of Qwen3.5 and Qwen3-VL: like Qwen3, with multimodal positions for models that have them."""

    def _load_tokenizer(self) -> "PreTrainedTokenizerBase":
        return _with_steady_history(super()._load_tokenizer())

    def set_mm_position_ids(self, feature: Row) -> Row:
        """Add ``position_ids``: (T,), or (4, 1, T) for a model with multimodal rotary embeddings.

        The four rows are the position in the text, time, row and column. For text they are all equal.
        """
        return _with_four_axes(super().set_mm_position_ids(feature), self.config)

    def get_vllm_input_ids(self, input_ids: Sequence[int]) -> Sequence[int]:
        """Replace every run of placeholders of an image or video by a single one, which vLLM expands itself."""
        return _one_pad_each(input_ids, self.tokenizer.get_added_vocab())


def _with_four_axes(feature: Row, config: "PretrainedConfig") -> Row:
    """Return a feature with positions (4, 1, T), if the model has multimodal rotary embeddings."""
    text_config: Mapping[str, Any] = config.get_text_config().to_dict()
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    positions = feature["position_ids"]
    if "mrope_section" not in rope or positions.ndim == 3:
        return feature
    return {**feature, "position_ids": np.broadcast_to(positions, (4, 1, len(positions))).copy()}


def _one_pad_each(input_ids: Sequence[int], vocabulary: Mapping[str, int]) -> list[int]:
    names = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>")
    start, *pads = (vocabulary.get(name) for name in names)
    kept: list[int] = []
    for token in input_ids:
        repeats = token in pads and len(kept) > 1 and kept[-1] == token and kept[-2] == start
        if not repeats:
            kept.append(token)
    return kept


def _with_steady_history(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    templates = tokenizer.chat_template
    if isinstance(templates, str):
        tokenizer.chat_template = _replaced(templates)
    elif templates:
        tokenizer.chat_template = {name: _replaced(source) for name, source in templates.items()}
    return tokenizer


def _replaced(source: str) -> str:
    for old, new in _REPLACED.items():
        source = source.replace(old, new)
    return source
