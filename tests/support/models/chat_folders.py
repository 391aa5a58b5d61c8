"""Folders with a tiny gpt-oss and a tiny Qwen3.5, whose tokenizers and chat templates are made like the real ones.

The tokenizers have the special tokens of the families, and some words in one token. Of the chat templates they have
the parts that conversations without tools use; gpt-oss has no system message of its own here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from twinkle.hub.model_folder import SpecialTokens, TokenIds, write_config, write_tokenizer
from twinkle.hub.random_model import random_model_config

_MERGES = 60  # tokens of more than one byte
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXT = "assistant user system developer analysis final commentary What is the weather? Look it up.\n\nIt is\n\n"

_HARMONY = """\
{%- for message in messages %}
{%- if message.role == 'system' %}<|start|>developer<|message|># Instructions\n\n{{ message.content }}\n\n<|end|>
{%- elif message.role == 'assistant' %}
{%- if message.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
_QWEN = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and loop.last %}
{{- '<think>\n' + (message.reasoning_content or '') | trim + '\n</think>\n\n' }}
{%- endif %}
{{- message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}"""


@dataclass(frozen=True)
class ChatFamily:
    """What makes the texts of a family. ``plain``: tokens of its markup that are no special tokens of the tokenizer."""

    model: str  # of random://
    special: Sequence[str]
    plain: Sequence[str]
    named: SpecialTokens
    other_ends: Sequence[str]
    template: str


CHAT_FAMILIES: Mapping[str, ChatFamily] = {
    "gpt_oss": ChatFamily(
        "gpt-oss-tiny",
        (
            "<|startoftext|>",
            "<|endoftext|>",
            "<|return|>",
            "<|constrain|>",
            "<|channel|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|call|>",
        ),
        (),
        SpecialTokens(bos="<|startoftext|>", eos="<|return|>", pad="<|endoftext|>", unk=None),
        ("<|endoftext|>", "<|call|>"),
        _HARMONY,
    ),
    "qwen3_5": ChatFamily(
        "qwen3.5-tiny",
        (
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|vision_start|>",
            "<|vision_end|>",
            "<|image_pad|>",
            "<|video_pad|>",
        ),
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        SpecialTokens(bos="<|endoftext|>", eos="<|im_end|>", pad="<|endoftext|>", unk=None),
        ("<|endoftext|>",),
        _QWEN,
    ),
}


def write_chat_folder(folder: Path, family: str) -> Path:
    """Write config, random weights, tokenizer and chat template, and return the folder."""
    folder.mkdir(parents=True)
    texts = CHAT_FAMILIES[family]
    tokenizer = _tokenizer(texts)
    ids = {token: tokenizer.token_to_id(token) for token in (*texts.special, *texts.plain)}
    config = _with_image_tokens(random_model_config(texts.model), ids)
    ends = tuple(ids[token] for token in texts.other_ends)
    write_tokenizer(folder, tokenizer, texts.named, texts.template, 2048)
    write_config(folder, config, TokenIds(ids[texts.named.bos], ids[texts.named.eos], ids[texts.named.pad], ends))
    generation = (folder / "generation_config.json").read_text()
    loads = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(5)
        loads.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(folder)
    (folder / "generation_config.json").write_text(generation)
    return folder


def _with_image_tokens(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a configuration whose tokens of images are those of the tokenizer."""
    names = {"vision_start": "vision_start", "vision_end": "vision_end", "image": "image_pad", "video": "video_pad"}
    own = {f"{field}_token_id": ids[f"<|{name}|>"] for field, name in names.items() if f"<|{name}|>" in ids}
    return {**json.loads(json.dumps(config)), **own}


def _tokenizer(texts: ChatFamily) -> Tokenizer:
    """Return byte pairs learned from a few words; white space and words are divided as in Qwen's tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + _MERGES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TEXT] * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in texts.special])
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in texts.plain])
    return tokenizer
