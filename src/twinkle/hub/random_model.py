"""``random://`` models: the shapes of real models, a byte-level tokenizer, and weights drawn from a seed.

The folder holds config and tokenizer only. The loader draws the weights on the device, which is faster for a billion
numbers than reading them from disk.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from twinkle.extras import require
from twinkle.hub.cache import announce, cached_folder
from twinkle.hub.model_folder import SpecialTokens, TokenIds, write_config, write_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["RANDOM_MODELS", "random_model_config", "random_model_folder"]

# Part of the cache key. Increase it when the files written below change, so that old folders are not used any more.
_FORMAT = 1

_LLAMA3_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

RANDOM_MODELS: dict[str, dict[str, object]] = {
    # Llama-3.2-1B
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0},
        "dtype": "bfloat16",
    },
    # Llama-3.1-8B
    "llama-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 8.0},
        "dtype": "bfloat16",
    },
    # for tests on CPU
    "llama-tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "dtype": "float32",
    },
    # for tests with vLLM, which on CPU supports no heads narrower than 32
    "llama-tiny-wide": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "dtype": "float32",
    },
}

# Token ids 0 to 255 are the bytes themselves; these follow.
_SPECIAL_TOKENS = ["<|begin_of_text|>", "<|eot_id|>", "<|pad|>", "<|start_header_id|>", "<|end_header_id|>"]
_SPECIAL = SpecialTokens(bos="<|begin_of_text|>", eos="<|eot_id|>", pad="<|pad|>", unk=None)
_TOKEN_IDS = TokenIds(bos=256, eos=257, pad=258)
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def random_model_folder(name: str) -> Path:
    """Return the cached folder of a random model, writing it if needed. All seeds share one folder."""

    def build(folder: Path, scratch: Path) -> None:
        _write_folder(name, folder)

    return cached_folder(f"random/{name}-v{_FORMAT}", build)


def random_model_config(name: str) -> dict[str, object]:
    """Return the configuration of a random model, without the ids of its special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "mlp_bias": False,
        **RANDOM_MODELS[name],
    }


def _write_folder(name: str, folder: Path) -> None:
    announce(f"writing config and tokenizer of random://{name}")
    config = random_model_config(name)
    write_config(folder, config, _TOKEN_IDS)
    max_length = config["max_position_embeddings"]
    assert isinstance(max_length, int)
    write_tokenizer(folder, _byte_tokenizer(), _SPECIAL, _CHAT_TEMPLATE, max_length)


def _byte_tokenizer() -> "Tokenizer":
    """Return a tokenizer whose ids below 256 are the UTF-8 bytes of the text, so any text survives a round trip."""
    require("tokenizers", "a model of random://")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    return tokenizer


def _byte_symbols() -> list[str]:
    """Return GPT-2's printable symbol of each byte: the byte itself if printable, else the next code point from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
