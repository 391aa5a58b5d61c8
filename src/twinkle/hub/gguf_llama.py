"""The Llama architecture in GGUF terms: its config fields, its tensor names, its order of rotary dimensions.

The conversion is done here and not through Transformers' ``gguf_file=``: with Transformers 5.22 the loaded model cannot
be saved, loading needs torch and accelerate, and it takes two to three times as long.
"""

from collections.abc import Iterator

import numpy as np
from gguf import dequantize
from numpy.typing import NDArray

from twinkle.errors import UnsupportedError
from twinkle.hub.gguf_file import GgufFile

__all__ = ["llama_config", "llama_tensors"]

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def llama_config(file: GgufFile) -> dict[str, object]:
    """Return the model's shape and constants as the fields of a Transformers config."""
    heads = file.require("llama.attention.head_count", int)
    hidden = file.require("llama.embedding_length", int)
    head_dim = file.get("llama.attention.key_length", hidden // heads)
    _refuse_other_rope(file, head_dim)
    names = _tensor_names(file)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": hidden,
        "num_hidden_layers": file.require("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": file.require("llama.feed_forward_length", int),
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),  # GGUF lists the fastest dimension first
        "max_position_embeddings": file.require("llama.context_length", int),
        # stored as fp32: 1e-05 comes back as 9.999999747378752e-06
        "rms_norm_eps": float(f"{file.require('llama.attention.layer_norm_rms_epsilon', float):.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": file.get("llama.rope.freq_base", 1e4)},
        "tie_word_embeddings": "output.weight" not in names,
    }


def llama_tensors(file: GgufFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield all weights in fp32, one at a time, under their Transformers names."""
    heads = file.require("llama.attention.head_count", int)
    key_value_heads = file.get("llama.attention.head_count_kv", heads)
    for source, target in _tensor_names(file).items():
        weight = dequantize(file.tensors[source].data, file.tensors[source].tensor_type)
        if target.endswith("q_proj.weight"):
            weight = _halves_from_pairs(weight, heads)
        elif target.endswith("k_proj.weight"):
            weight = _halves_from_pairs(weight, key_value_heads)
        yield target, weight


def _tensor_names(file: GgufFile) -> dict[str, str]:
    """Map GGUF tensor names to Transformers names; raise if a tensor of a plain Llama is missing or one is unknown."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if "output.weight" in file.tensors:  # otherwise the output head shares the embedding's weights
        names["output.weight"] = "lm_head.weight"
    for layer in range(file.require("llama.block_count", int)):
        for source, target in _LAYER_PARTS.items():
            names[f"blk.{layer}.{source}.weight"] = f"model.layers.{layer}.{target}.weight"
    odd = sorted(names.keys() ^ file.tensors.keys())
    if odd:
        raise UnsupportedError(
            f"{file.name} is not a plain Llama model: missing or unknown tensors {', '.join(odd[:5])}"
        )
    return names


def _halves_from_pairs(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder a head's rows: llama.cpp rotates the pairs (2i, 2i+1), Transformers the pairs (i, i + head_dim/2)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _refuse_other_rope(file: GgufFile, head_dim: int) -> None:
    scaling = file.get("llama.rope.scaling.type", "none")
    rotated = file.get("llama.rope.dimension_count", head_dim)
    if scaling != "none" or rotated != head_dim:
        raise UnsupportedError(
            f"{file.name} has RoPE scaling {scaling!r} over {rotated} of {head_dim} dimensions; only plain RoPE over "
            "all of them can be converted"
        )
