"""Complete weights in a Hugging Face folder: ``model.safetensors``, or several such files and an index.

A folder is examined before anything is copied from it: the headers of its files say which weights they hold, and in
which shapes. So a folder that is damaged, or is another model's, is refused before a set of weights is overwritten.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twinkle.errors import CheckpointError

_SINGLE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"


class WeightFolder:
    """The files of a folder, with the names of the weights to read from each."""

    def __init__(self, directory: Path, names: Mapping[Path, Collection[str]]) -> None:
        self.directory = directory
        self._names = names

    @classmethod
    def open(cls, directory: Path, shapes: Mapping[str, torch.Size], ties: Collection[str]) -> Self:
        """Examine a folder that must hold all weights in ``shapes``, and may also hold those in ``ties``.

        ties: names of weights that the model does not store, because they are the same as others. CheckpointError: the
        folder is missing, damaged, or holds other weights than these.
        """
        if (directory / _ADAPTER).exists():
            raise CheckpointError(
                f"{directory} holds a LoRA adapter: this server trains all parameters (train_mode: full), and samples "
                "from checkpoints with all weights"
            )
        found: dict[str, Path] = {}
        for file in _files(directory):
            for name, shape in _headers(file).items():
                if name in ties:
                    continue
                if name in found or shapes.get(name) != shape:
                    raise CheckpointError(
                        f"{directory}: {file.name} has {name} {tuple(shape)}, "
                        + ("which another file has too" if name in found else _expected(name, shapes))
                    )
                found[name] = file
        missing = [name for name in shapes if name not in found]
        if missing:
            raise CheckpointError(f"{directory} lacks {len(missing)} of {len(shapes)} weights, first {missing[0]}")
        by_file: dict[Path, list[str]] = {}
        for name, file in found.items():
            by_file.setdefault(file, []).append(name)
        return cls(directory, by_file)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Read all weights, one at a time. CheckpointError: a file is gone or damaged."""
        for file, names in self._names.items():
            try:
                with safe_open(file, "pt") as opened:
                    for name in names:
                        yield name, opened.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise _damaged(file, error) from error


def _files(directory: Path) -> list[Path]:
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    index = directory / _INDEX
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {_SINGLE} and no {_INDEX}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(index, error) from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} is damaged: got {shard!r}, allowed: names of files in the same folder")
    return [directory / shard for shard in sorted(shards)]


def _headers(file: Path) -> dict[str, torch.Size]:
    try:
        with safe_open(file, "pt") as opened:
            return {name: torch.Size(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from error


def _expected(name: str, shapes: Mapping[str, torch.Size]) -> str:
    return f"the model has {tuple(shapes[name])}" if name in shapes else "which the model does not have"


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} is missing or damaged: {str(error).splitlines()[0] if str(error) else error!r}")
