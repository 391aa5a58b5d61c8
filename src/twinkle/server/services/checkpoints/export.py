"""Exports adapters for other tools: PEFT's two files, without any file that only this server can read.

The adapter of the head has the name that Tinker gives it, ``base_model.model.model.unembed_tokens``. Tools that read
these files apply it to ``lm_head``, or to the embeddings where they are tied to the head.
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
from twinkle.utils.progress import Progress

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEAD = "base_model.model.model.unembed_tokens"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)(?P<part>\.lora_[AB]\.weight)")


def prepare_export(trainer: TrainingBackend, adapter_id: str, recipients: Sequence[str]) -> Callable[[Path], None]:
    """Copy the adapter's weights, and return a function that writes the directory, atomically.

    The files are encrypted to ``recipients``, if there are any. Called in the compute thread; the returned function may
    run in any thread.
    """
    weights = {exported_name(name): array for name, array in trainer.weights(adapter_id).items()}
    fill = partial(_fill, weights=weights, config=trainer.peft_config(adapter_id), recipients=recipients)

    def write(directory: Path) -> None:
        with Progress(f"exporting {adapter_id}", detail=lambda: _written(weights)):
            write_whole(directory, fill=fill)

    return write


def exported_name(name: str) -> str:
    """Return the name of a tensor in the exported file. A module outside the decoder layers can only be the head."""
    found = _NAME.fullmatch(name)
    if found is None or "layers" in found["module"].split("."):
        return name
    return _HEAD + found["part"]


def _written(weights: Mapping[str, FloatArray]) -> str:
    return f"writing {sum(array.nbytes for array in weights.values()) / 1e6:.0f} MB"


def _fill(
    directory: Path, weights: Mapping[str, FloatArray], config: Mapping[str, object], recipients: Sequence[str]
) -> None:
    save_file(dict(weights), directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    if recipients:
        encrypt_files(directory, recipients)
    for file in directory.iterdir():
        os.chmod(file, 0o600)
