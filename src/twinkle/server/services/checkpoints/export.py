"""Exports weights for other tools, without any file that only this server can read.

An adapter is exported as PEFT's two files, and all parameters of a model as the files of a Hugging Face model.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors.numpy import save_file

from twinkle.model.adapters.peft_config import NOTE, head_note, trains_head
from twinkle.model.types import FloatArray
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.state.files.data_dir import write_whole
from twinkle.server.state.files.export import encrypt_files
from twinkle.utils.progress import Progress

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_[AB]\.weight")


def prepare_export(trainer: TrainingBackend, adapter_id: str, recipients: Sequence[str]) -> Callable[[Path], None]:
    """Copy the adapter's weights, and return a function that writes the directory, atomically.

    The files are encrypted to ``recipients``, if there are any. Called in the compute thread; the returned function may
    run in any thread.
    """
    weights, config = trainer.weights(adapter_id), trainer.peft_config(adapter_id)
    fill = partial(_fill, weights=weights, config=config, recipients=recipients)

    def write(directory: Path) -> None:
        with Progress(f"exporting {adapter_id}", detail=lambda: _written(weights)):
            write_whole(directory, fill=fill)

    return write


def prepare_full_export(trainer: TrainingBackend, adapter_id: str, recipients: Sequence[str]) -> Callable[[Path], None]:
    """Copy all parameters of the model, and return a function that writes the directory, as :func:`prepare_export`."""
    copied = trainer.prepare_save(adapter_id, optimizer=False)

    def fill(directory: Path) -> None:
        whole = directory / "model"  # the trainer's function wants to make its directory itself
        copied(whole)
        for file in list(whole.iterdir()):
            file.rename(directory / file.name)
        whole.rmdir()
        _finish(directory, recipients)

    def write(directory: Path) -> None:
        with Progress(f"exporting {adapter_id}", detail=lambda: "writing all parameters"):
            write_whole(directory, fill=fill)

    return write


def _written(weights: Mapping[str, FloatArray]) -> str:
    return f"writing {sum(array.nbytes for array in weights.values()) / 1e6:.0f} MB"


def _fill(
    directory: Path, weights: Mapping[str, FloatArray], config: Mapping[str, object], recipients: Sequence[str]
) -> None:
    save_file(dict(weights), directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    modules = [found["module"] for found in map(_NAME.fullmatch, weights) if found is not None]
    if trains_head(modules):
        (directory / NOTE).write_text(head_note(str(config["base_model_name_or_path"])))
    _finish(directory, recipients)


def _finish(directory: Path, recipients: Sequence[str]) -> None:
    if recipients:
        encrypt_files(directory, recipients)
    for file in directory.iterdir():
        os.chmod(file, 0o600)
