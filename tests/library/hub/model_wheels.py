"""Write wheels that contain small models, so that ``pypi://`` can be tested with a local directory of wheels."""

from pathlib import Path
from zipfile import ZipFile

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

HEADS, KEY_VALUE_HEADS, LAYERS, HIDDEN, INTERMEDIATE = 4, 2, 2, 128, 256
BYTES = [chr(33 + i) for i in range(90)]
SPECIAL = ["<s>", "</s>"]
TOKENS = [*SPECIAL, *BYTES, "ab", "Ġ", "Ċ"]

Weights = dict[str, np.ndarray]


def write_wheel(directory: Path, package: str, version: str, files: dict[str, bytes]) -> None:
    """Write a wheel with ``files`` and the metadata that pip needs."""
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    with ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def llama_weights(seed: int = 0) -> Weights:
    """Return random weights of a small untied Llama, by their Transformers names."""
    generator = np.random.default_rng(seed)
    key_value = HIDDEN // HEADS * KEY_VALUE_HEADS
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "lm_head": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.input_layernorm": (HIDDEN,), f"{prefix}.post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"{prefix}.self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qo"}
        shapes |= {f"{prefix}.self_attn.{part}_proj": (key_value, HIDDEN) for part in "kv"}
        shapes |= {f"{prefix}.mlp.{part}_proj": (INTERMEDIATE, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj": (HIDDEN, INTERMEDIATE)}
    return {f"{name}.weight": generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_bytes(
    path: Path, weights: Weights, changes: dict[str, str | bool] | None = None, packed: bool = False
) -> bytes:
    """Return a GGUF file of ``weights`` as llama.cpp writes it. ``changes`` replaces fields; ``packed`` means Q8_0."""
    changes = changes or {}
    writer = GGUFWriter(path, str(changes.get("general.architecture", "llama")))
    _write_fields(writer, changes)
    for name, weight in weights.items():
        stored = _in_pairs(name, weight)
        kind = GGMLQuantizationType.Q8_0 if packed and weight.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _write_fields(writer: GGUFWriter, changes: dict[str, str | bool]) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(str(changes.get("tokenizer.ggml.model", "gpt2")))
    writer.add_tokenizer_pre(str(changes.get("tokenizer.ggml.pre", "smollm")))
    writer.add_add_bos_token(bool(changes.get("tokenizer.ggml.add_bos_token", False)))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _in_pairs(name: str, weight: np.ndarray) -> np.ndarray:
    """Apply llama.cpp's ``permute`` to the query and key rows."""
    heads = {"q_proj.weight": HEADS, "k_proj.weight": KEY_VALUE_HEADS}.get(name.rpartition("self_attn.")[2])
    if heads is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers": "blk",
        "lm_head": "output",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name
