"""Adapters written for other tools: PEFT's two files, and nothing that only we can read.

The head's adapter has Tinker's name for it, ``base_model.model.model.unembed_tokens``: who reads these files puts it on
``lm_head``, or on the embeddings where they are tied to it.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors.numpy import save_file

from twinkle.model.types import FloatArray
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.state.files.data_dir import write_whole
from twinkle.server.state.files.export import encrypt_files

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEAD = "base_model.model.model.unembed_tokens"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)(?P<part>\.lora_[AB]\.weight)")


def prepare_export(trainer: TrainingBackend, adapter_id: str, recipients: Sequence[str]) -> Callable[[Path], None]:
    """In the compute thread; what it returns writes the directory, whole or not at all."""
    weights = {exported_name(name): array for name, array in trainer.weights(adapter_id).items()}
    fill = partial(_fill, weights=weights, config=trainer.peft_config(adapter_id), recipients=recipients)
    return partial(write_whole, fill=fill)


def exported_name(name: str) -> str:
    """Of a tensor. Every module that carries an adapter is a part of a decoder layer, except the head."""
    found = _NAME.fullmatch(name)
    if found is None or "layers" in found["module"].split("."):
        return name
    return _HEAD + found["part"]


def _fill(
    directory: Path, weights: Mapping[str, FloatArray], config: Mapping[str, object], recipients: Sequence[str]
) -> None:
    save_file(dict(weights), directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    if recipients:
        encrypt_files(directory, recipients)
    for file in directory.iterdir():
        os.chmod(file, 0o600)
