"""Convert a GGUF file into a Hugging Face folder with bf16 weights, without torch or Transformers."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quantize
from numpy.typing import NDArray

from twinkle.errors import UnsupportedError
from twinkle.hub.gguf_file import GgufFile, read_gguf
from twinkle.hub.gguf_llama import llama_config, llama_tensors
from twinkle.hub.gguf_tokenizer import gguf_special_tokens, gguf_token_ids, gguf_tokenizer
from twinkle.hub.model_folder import write_config, write_tokenizer

__all__ = ["convert_gguf"]


@dataclass(frozen=True)
class _Architecture:
    config: Callable[[GgufFile], dict[str, object]]
    tensors: Callable[[GgufFile], Iterable[tuple[str, NDArray[np.float32]]]]


_ARCHITECTURES = {"llama": _Architecture(llama_config, llama_tensors)}


def convert_gguf(source: Path, folder: Path) -> None:
    """Fill ``folder`` with config, tokenizer and weights of the GGUF file ``source``."""
    file = read_gguf(source)
    name = file.require("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{file.name} has the architecture {name!r}; can be converted: {', '.join(sorted(_ARCHITECTURES))}"
        )
    architecture = _ARCHITECTURES[name]
    write_config(folder, {**architecture.config(file), "dtype": "bfloat16"}, gguf_token_ids(file))
    chat_template: str | None = file.fields.get("tokenizer.chat_template")
    max_length = file.require(f"{name}.context_length", int)
    write_tokenizer(folder, gguf_tokenizer(file), gguf_special_tokens(file), chat_template, max_length)
    _write_bf16(folder / "model.safetensors", architecture.tensors(file))


def _write_bf16(path: Path, tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> None:
    """Write a safetensors file: length of the header (8 bytes), header (JSON), data.

    Written by hand, because the safetensors library accepts bf16 only as torch tensors, and its untyped entry point
    changed between 0.7 and 0.8.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    end = 0
    for name, tensor in tensors:
        chunks.append(quantize(tensor, GGMLQuantizationType.BF16).tobytes())
        start, end = end, end + len(chunks[-1])
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # readers memory-map the file, so the data has to be aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.writelines(chunks)
