"""``random://`` models: the shapes of real models, a byte-level tokenizer, and weights drawn from a seed.

The folder holds config and tokenizer only, and for a vision model the settings of its image processor. The loader
draws the weights on the device, which is faster for a billion numbers than reading them from disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle.extras import require
from twinkle.hub.cache import announce, cached_folder
from twinkle.hub.model_folder import (
    SpecialTokens,
    TokenIds,
    write_config,
    write_image_processor,
    write_tokenizer,
)
from twinkle.hub.random_shapes import HARMONY_SPECIAL_TOKENS, QWEN_SPECIAL_TOKENS, RANDOM_MODELS, patch_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["random_model_config", "random_model_folder"]

# Part of the cache key. Increase it when the files written below change, so that old folders are not used any more.
_FORMAT = 2

# What makes a model's texts: special tokens, whose ids follow those of the 256 bytes, and the form of a chat.
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|eot_id|>", "<|pad|>", "<|start_header_id|>", "<|end_header_id|>")
_LLAMA_SPECIAL = SpecialTokens(bos="<|begin_of_text|>", eos="<|eot_id|>", pad="<|pad|>", unk=None)
_LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_QWEN_SPECIAL = SpecialTokens(bos="<|endoftext|>", eos="<|im_end|>", pad="<|endoftext|>", unk=None)
_QWEN_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_HARMONY_SPECIAL = SpecialTokens(bos="<|startoftext|>", eos="<|return|>", pad="<|endoftext|>", unk=None)
# The real template also writes a system message of its own, with the date, and describes tools.
_HARMONY_CHAT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% if message['thinking'] %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message['thinking'] + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


@dataclass(frozen=True)
class _Texts:
    """What makes the texts of a family: its special tokens, and the form of a chat. ``ends``: also end a turn."""

    tokens: Sequence[str]
    special: SpecialTokens
    chat: str
    ends: Sequence[str] = ()


_OF_QWEN = _Texts(QWEN_SPECIAL_TOKENS, _QWEN_SPECIAL, _QWEN_CHAT)
_OF_OTHERS = {
    "llama": _Texts(_LLAMA_TOKENS, _LLAMA_SPECIAL, _LLAMA_CHAT),
    "gpt_oss": _Texts(HARMONY_SPECIAL_TOKENS, _HARMONY_SPECIAL, _HARMONY_CHAT, ("<|endoftext|>", "<|call|>")),
}


def random_model_folder(name: str) -> Path:
    """Return the cached folder of a random model, writing it if needed. All seeds share one folder."""

    def build(folder: Path, scratch: Path) -> None:
        _write_folder(name, folder)

    return cached_folder(f"random/{name}-v{_FORMAT}", build)


def random_model_config(name: str) -> dict[str, object]:
    """Return the configuration of a random model, without the ids of its special tokens."""
    return dict(RANDOM_MODELS[name])


def _write_folder(name: str, folder: Path) -> None:
    announce(f"writing config and tokenizer of random://{name}")
    config = random_model_config(name)
    texts = _OF_OTHERS.get(str(config["model_type"]), _OF_QWEN)
    special, ids = texts.special, {token: 256 + number for number, token in enumerate(texts.tokens)}
    ends = tuple(ids[token] for token in texts.ends)
    write_config(folder, config, TokenIds(ids[special.bos], ids[special.eos], ids[special.pad], ends))
    decoder = config.get("text_config", config)
    assert isinstance(decoder, dict)
    write_tokenizer(folder, _byte_tokenizer(texts.tokens), special, texts.chat, decoder["max_position_embeddings"])
    size = patch_size(config)
    if size is not None:
        write_image_processor(folder, size, **_pixels(name, size))


def _pixels(name: str, patch: int) -> dict[str, int]:
    """Return the fewest and the most pixels of an image. A tiny model sees at most 64 tokens of an image."""
    token = (2 * patch) ** 2
    if name.endswith("-tiny"):
        return {"fewest_pixels": token, "most_pixels": 64 * token}
    return {"fewest_pixels": 64 * token, "most_pixels": 16384 * token}


def _byte_tokenizer(special_tokens: Sequence[str]) -> "Tokenizer":
    """Return a tokenizer whose ids below 256 are the UTF-8 bytes of the text, so any text survives a round trip."""
    require("tokenizers", "a model of random://")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


def _byte_symbols() -> list[str]:
    """Return GPT-2's printable symbol of each byte: the byte itself if printable, else the next code point from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
