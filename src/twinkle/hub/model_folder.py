"""Write the config, tokenizer and image processor files of a Hugging Face style model folder.

They are written as plain JSON, not with ``save_pretrained``, so that the content of the cache does not depend on the
installed version of Transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle.errors import UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "SpecialTokens",
    "TokenIds",
    "require_model_folder",
    "write_config",
    "write_image_processor",
    "write_tokenizer",
]


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens as text; ``unk`` is None for a vocabulary without an unknown token."""

    bos: str
    eos: str
    pad: str
    unk: str | None


@dataclass(frozen=True)
class TokenIds:
    """The ids of the special tokens, for the model's config. ``other_ends``: tokens beside eos that end a turn."""

    bos: int
    eos: int
    pad: int
    other_ends: tuple[int, ...] = ()


def write_config(folder: Path, config: Mapping[str, object], ids: TokenIds) -> None:
    """Write config.json and the generation_config.json that makes ``generate`` stop at the eos token.

    A vision model has the ids in the configuration of its text too, where the defaults are ids of real models.
    """
    ends = [ids.eos, *ids.other_ends] if ids.other_ends else ids.eos
    token_ids = {"bos_token_id": ids.bos, "eos_token_id": ends, "pad_token_id": ids.pad}
    text = config.get("text_config")
    nested = {"text_config": {**text, **token_ids}} if isinstance(text, dict) else {}
    _write_json(folder / "config.json", {**config, **nested, **token_ids})
    _write_json(folder / "generation_config.json", token_ids)


def write_tokenizer(
    folder: Path, tokenizer: "Tokenizer", special: SpecialTokens, chat_template: str | None, max_length: int
) -> None:
    """Write the files that AutoTokenizer reads."""
    # to_str rather than save, which raises a bare Exception when the disk is full
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    if chat_template is not None:  # base models have none
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    config: dict[str, object] = {
        # the generic class uses tokenizer.json unchanged; LlamaTokenizer would rebuild it with another pre-tokenizer
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special.bos,
        "eos_token": special.eos,
        "pad_token": special.pad,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if special.unk is not None:
        config["unk_token"] = special.unk
    _write_json(folder / "tokenizer_config.json", config)


def write_image_processor(folder: Path, patch_size: int, *, fewest_pixels: int, most_pixels: int) -> None:
    """Write the preprocessor_config.json of Qwen's image processor: a token is a square of two by two patches."""
    config = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": fewest_pixels, "longest_edge": most_pixels},
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    _write_json(folder / "preprocessor_config.json", config)


def require_model_folder(folder: Path) -> Path:
    """Return ``folder``; raise UnsupportedError if it has no config.json."""
    if not (folder / "config.json").is_file():
        raise UnsupportedError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    return folder


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
