"""Exports weights for other tools, without any file that only this server can read.

An adapter is exported as PEFT's two files, and all parameters of a model as the files of a Hugging Face model.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from twinkle.errors import InvalidInputError
from twinkle.model.adapters.peft_config import NOTE, head_note, trains_head
from twinkle.model.types import ADAPTER_FORMATS, FloatArray, tinker_name
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.state.files.data_dir import write_whole
from twinkle.server.state.files.export import TarStream, encrypt_files
from twinkle.server.state.files.file_checksums import check_files
from twinkle.utils.progress import Progress

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NUMBER_BYTES = 4  # our files have float32
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_[AB]\.weight")


def prepare_export(
    trainer: TrainingBackend, adapter_id: str, family: str, recipients: Sequence[str]
) -> Callable[[Path], None]:
    """Copy the adapter's weights, and return a function that writes the directory, atomically.

    The names are those of Tinker's files for a model of this family.

    The files are encrypted to ``recipients``, if there are any. Called in the compute thread; the returned function may
    run in any thread.
    """
    config = trainer.peft_config(adapter_id)
    weights = {tinker_name(name, family): array for name, array in trainer.weights(adapter_id).items()}
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


def check_format(form: str | None) -> None:
    """Raise InvalidInputError if there is no form of adapters of this name."""
    if form is not None and form not in ADAPTER_FORMATS:
        raise InvalidInputError("format", form, f"one of {', '.join(ADAPTER_FORMATS)}")


def conversion_bytes(directory: Path) -> int:
    """Return about how much memory :func:`converted_tar` takes; 0 for what it refuses. Reads the names of tensors.

    A form may have a copy of a factor for each expert where the file has one for all of them.
    """
    try:
        with safe_open(directory / WEIGHTS, "numpy") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError):
        return 0
    experts = max((shape[0] for shape in shapes.values() if len(shape) == 3), default=1)
    copied = sum(math.prod(shape) * (experts if len(shape) == 3 and shape[0] == 1 else 1) for shape in shapes.values())
    # As read, and twice as written: while a form is made, its parts are there, too.
    return _NUMBER_BYTES * (sum(map(math.prod, shapes.values())) + 2 * copied)


def converted_tar(directory: Path, form: str, family: str, root: str, modified: float) -> TarStream:
    """Return the adapter of a model of this family in another form, as a tar stream whose files are already deleted.

    Blocks, and holds the adapter in memory in both forms, see :func:`conversion_bytes`.
    """
    # It imports torch, which a server whose models are in other processes needs only for this.
    from twinkle.model.adapters.expert_exports import convert_folder

    if not all((directory / file).is_file() for file in (CONFIG, WEIGHTS)):
        raise InvalidInputError("format", form, "nothing: the checkpoint is encrypted, or no adapter")
    check_files(directory)
    # Named like unfinished files, which the server removes if it was killed meanwhile.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.", suffix=".tmp") as staging:
        convert_folder(directory, Path(staging), form, alternating=family == "gpt_oss")
        return TarStream(Path(staging), root, modified)


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
