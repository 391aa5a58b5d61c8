"""Checkpoints of runs that train all parameters: Hugging Face folders with the optimizer's state beside the weights.

    config.json, generation_config.json, tokenizer files      as in the base model's folder
    model.safetensors            the weights by the model's own names; if large, model-00001-of-0000N.safetensors … with
                                 model.safetensors.index.json
    optimizer.safetensors        exp_avg.<name> and exp_avg_sq.<name>, fp32: the optimizer's first and second row of
                                 state, for Adam its moments; absent if saved without the optimizer
    trainer_state.json           counts of steps and training passes, optimizer, base model

With the optimizer's state the weights are the fp32 master weights, so that training continues exactly; without it they
have the dtype that the model computes with. Transformers loads either with that dtype, which config.json names. A
folder appears complete or not at all, see :func:`twinkle.model.adapters.checkpoint.write_whole`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twinkle.errors import CheckpointError, NoOptimizerStateError
from twinkle.model.adapters.adapter import ADAM
from twinkle.model.adapters.checkpoint import (
    FORMAT,
    MOMENTS,
    NEW_STATE,
    OPTIMIZER,
    STATE,
    TrainingState,
    read_json,
    read_training_state,
    write_json,
    write_whole,
)
from twinkle.model.full.layout import ParameterLayout
from twinkle.model.library.training_state import copy_tokenizer
from twinkle.model.types import EMPTY
from twinkle.model.weights.tensor_files import write_tensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5 * 10**9  # of a file of weights, as Transformers writes them
_SHOWN = 5  # names in an error
# Constants that old checkpoints hold beside the weights; models compute them.
_CONSTANTS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class ModelFiles:
    """What a folder of a model holds beside its weights: contents of files, and where its tokenizer comes from."""

    base_model: str
    config: str
    generation_config: str | None
    tokenizer_id: str | None  # None: there is no tokenizer to copy


@dataclass(frozen=True)
class FullCopy:
    """A run for writing to disk. Its tensors, whole and in the layout's order, are copies in host memory or generators.

    ``dtype``: of the weights in the file. ``moments``: empty if saved without the optimizer.
    """

    layout: ParameterLayout
    files: ModelFiles
    dtype: torch.dtype
    weights: Iterable[Tensor]
    moments: Sequence[Iterable[Tensor]]
    step: int = 0
    passes: int = 0
    optimizer: str = ADAM
    scalars: Mapping[str, float] = field(default_factory=dict)


def save_full(
    copy: FullCopy,
    directory: Path,
    *,
    overwrite: bool,
    state: Mapping[str, object] = EMPTY,
    companions: Callable[[Path], None] | None = None,
    synced: bool = True,
) -> None:
    """Write a run to a directory.

    ``state``: further entries of trainer_state.json. ``companions``: a function that writes further files into the
    directory it is given. ``synced``: see :func:`~twinkle.model.adapters.checkpoint.write_whole`.
    """

    def write(staging: Path) -> None:
        _write_files(copy, staging, state)
        if companions is not None:
            companions(staging)

    write_whole(directory, write, overwrite=overwrite, synced=synced)


def _write_files(copy: FullCopy, staging: Path, more_state: Mapping[str, object]) -> None:
    files = copy.files
    (staging / "config.json").write_text(files.config)
    if files.generation_config is not None:
        (staging / "generation_config.json").write_text(files.generation_config)
    _write_weights(copy, staging)
    if copy.moments:
        _write_moments(copy, staging)
    state = {
        "format": FORMAT,
        "train_mode": "full",
        "step": copy.step,
        "passes": copy.passes,
        "optimizer": copy.optimizer,
        "scalars": dict(copy.scalars),
        "base_model": files.base_model,
    }
    write_json(staging / STATE, {**more_state, **state})
    if files.tokenizer_id is not None:
        copy_tokenizer(files.tokenizer_id, staging)


def _write_weights(copy: FullCopy, staging: Path) -> None:
    """Write weights as Transformers does: one file, or several with an index."""
    layout = copy.layout
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    sizes = {name: torch.empty(shape, dtype=copy.dtype, device="meta") for name, shape in shapes.items()}
    split = split_torch_state_dict_into_shards(
        sizes, filename_pattern="model{suffix}.safetensors", max_shard_size=_SHARD_BYTES
    )
    files = {
        staging / file: {name: shapes[name] for name in names} for file, names in split.filename_to_tensors.items()
    }
    write_tensors(files, copy.dtype, zip(layout.names, copy.weights, strict=True))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (staging / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_moments(copy: FullCopy, staging: Path) -> None:
    layout = copy.layout
    shapes = {
        f"{kind}.{name}": shape for kind in MOMENTS for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
    tensors = (
        (f"{kind}.{name}", tensor)
        for kind, tensors in zip(MOMENTS, copy.moments, strict=True)
        for name, tensor in zip(layout.names, tensors, strict=True)
    )
    write_tensors({staging / OPTIMIZER: shapes}, torch.float32, tensors)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose names, shapes and numbers were checked. Tensors are read one by one."""

    weights: "StoredTensors"
    moments: Sequence["StoredTensors"]  # empty: without the optimizer's state
    state: TrainingState


def read_full(
    directory: Path, layout: ParameterLayout, *, optimizer: bool, names: Sequence[str] | None = None
) -> Loaded:
    """Open a folder of weights for a model of this layout. Everything is checked here: nothing fails afterwards.

    names: the parameters that will be read; the numbers of others are not checked. None: all.
    """
    own = layout.names if names is None else names
    weights = StoredTensors(_weight_files(directory), layout, "", directory)
    weights.check(own)
    if not optimizer:
        return Loaded(weights, (), NEW_STATE)
    path = directory / OPTIMIZER
    if not path.exists():
        raise NoOptimizerStateError(f"{directory} holds no optimizer state; load it with optimizer=False")
    moments = [StoredTensors(_names_in(path), layout, f"{kind}.", path) for kind in MOMENTS]
    for each in moments:
        each.check(own)
    return Loaded(weights, moments, read_training_state(directory / STATE))


class StoredTensors:
    """The tensors of a layout in the files of a checkpoint, under their names with a prefix."""

    def __init__(self, files: Mapping[str, Path], layout: ParameterLayout, prefix: str, source: Path) -> None:
        self._files = {name: path for name, path in files.items() if name.startswith(prefix)}
        self._layout = layout
        self._prefix = prefix
        self._source = source

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the tensors in the layout's order."""
        return self.read(self._layout.names)

    def read(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield the tensors of these parameters."""
        with _Opened() as opened:
            for name in names:
                yield opened.read(*self._place(name))

    def check(self, names: Sequence[str]) -> None:
        """Raise a CheckpointError for names and shapes that do not fit, and for numbers of ``names`` that do not."""
        self._check_names()
        aliases, own = dict(self._layout.aliases), frozenset(names)
        with _Opened() as opened:
            for name, shape in zip(self._layout.names, self._layout.shapes, strict=True):
                path, stored = self._place(name)
                found = opened.shape(path, stored)
                if found != shape:
                    raise CheckpointError(f"{path}: {stored} has shape {found}, expected {shape}")
                if name not in own:
                    continue
                tensor = opened.read(path, stored)
                if not tensor.is_floating_point():
                    raise CheckpointError(f"{path}: {stored} is {tensor.dtype}, expected floating-point numbers")
                if not tensor.isfinite().all():
                    raise CheckpointError(f"{path}: {stored} holds NaN or infinity")
            for alias, name in aliases.items():
                both = [name in own, *(self._prefix + each in self._files for each in (alias, name))]
                if all(both) and not torch.equal(*(opened.read(*self._at(each)) for each in (alias, name))):
                    raise CheckpointError(f"{self._source}: {alias} differs from {name}; this model has them tied")

    def _check_names(self) -> None:
        aliases = dict(self._layout.aliases)
        found = {name.removeprefix(self._prefix) for name in self._files if not name.endswith(_CONSTANTS)}
        found = {aliases.get(name, name) for name in found}
        missing, extra = sorted(set(self._layout.names) - found), sorted(found - set(self._layout.names))
        if missing or extra:
            raise CheckpointError(
                f"{self._source} does not fit this model; missing {_some(missing)}, unexpected {_some(extra)}"
            )

    def _place(self, name: str) -> tuple[Path, str]:
        """Return the file of a weight and its name there, which may be another name of tied weights."""
        names = (name, *(alias for alias, first in self._layout.aliases if first == name))
        return self._at(next(each for each in names if self._prefix + each in self._files))

    def _at(self, name: str) -> tuple[Path, str]:
        return self._files[self._prefix + name], self._prefix + name


class _Opened:
    """Files of tensors, each of which is opened once."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> "_Opened":
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._files.values():
            opened.__exit__(None, None, None)

    def read(self, path: Path, name: str) -> Tensor:
        with _reading(path):
            tensor: Tensor = self._open(path).get_tensor(name)
            return tensor

    def shape(self, path: Path, name: str) -> tuple[int, ...]:
        with _reading(path):
            return tuple(self._open(path).get_slice(name).get_shape())

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt").__enter__()
        return self._files[path]


def _weight_files(directory: Path) -> dict[str, Path]:
    """Return the file of each weight of a folder."""
    if (directory / WEIGHTS).exists():
        return _names_in(directory / WEIGHTS)
    if not (directory / INDEX).exists():
        raise CheckpointError(f"{directory} holds no weights of a whole model: no {WEIGHTS}, no {INDEX}")
    mapping = read_json(directory / INDEX).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
        raise CheckpointError(f"{directory / INDEX}: weight_map: got {type(mapping).__name__}, allowed: names of files")
    outside = [file for file in mapping.values() if Path(file).name != file]
    if outside:
        raise CheckpointError(f"{directory / INDEX}: weight_map: got {outside[0]!r}, allowed: files of that folder")
    found: dict[str, Path] = {}
    for file in sorted(set(mapping.values())):
        found |= _names_in(directory / file)
    absent = sorted(set(mapping) - set(found))
    if absent:
        raise CheckpointError(f"{directory}: {_some(absent)} are in {INDEX}, but not in the files it names")
    return found


def _names_in(path: Path) -> dict[str, Path]:
    with _reading(path), safe_open(path, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not read {path}: {error}") from error


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) or "nothing"
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
