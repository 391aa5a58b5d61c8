"""Checkpoints in safetensors files: read tensors one by one, and write a model without holding all of it in memory."""

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from twinkle.environment import read_launch
from twinkle.errors import InvalidInputError
from twinkle.framework_util import to_local_tensor

__all__ = ["LazyTensor", "SafetensorLazyLoader", "StreamingSafetensorSaver", "copy_files_by_pattern"]

_MODEL, _ADAPTER, _INDEX = "model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json"
_BYTES_OF_GB = 10**9  # as Transformers counts


class LazyTensor:
    """A tensor, or a function that reads it each time it is wanted."""

    def __init__(self, tensor: Tensor | None = None, loader: Callable[[], Tensor] | None = None) -> None:
        if (tensor is None) == (loader is None):
            raise InvalidInputError("tensor", tensor, "exactly one of tensor and loader")
        self.tensor = tensor
        self.loader = loader

    def load(self) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        assert self.loader is not None
        return self.loader()


class SafetensorLazyLoader:
    """Reads the tensors of a checkpoint directory one by one. It keeps its files open until ``close()``."""

    def __init__(self, hf_model_dir: str | PathLike[str], is_peft_format: bool = False) -> None:
        self._folder = Path(hf_model_dir)
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        self._is_adapter = is_peft_format

    def get_state_dict(self) -> dict[str, LazyTensor]:
        """Return all tensors by name, unread."""
        return {name: LazyTensor(loader=partial(self._read, file, name)) for name, file in self._places().items()}

    def close(self) -> None:
        self._open.clear()
        self._files.close()

    def __enter__(self) -> "SafetensorLazyLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _places(self) -> dict[str, str]:
        """Return the file of each tensor."""
        index = self._folder / _INDEX
        if not self._is_adapter and index.is_file():
            places: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return places
        file = _ADAPTER if self._is_adapter else _MODEL
        if not (self._folder / file).is_file():
            raise InvalidInputError("hf_model_dir", str(self._folder), f"a directory with {file}")
        return dict.fromkeys(self._opened(file).keys(), file)

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = self._files.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._open[file]

    def _read(self, file: str, name: str) -> Tensor:
        tensor: Tensor = self._opened(file).get_tensor(name)
        return tensor


class StreamingSafetensorSaver:
    """Writes tensors in the order in which they are added, in files of at most ``max_shard_size``.

    Only one process writes: the last rank of the launch, or the first one (``save_rank="master"``). A checkpoint is
    complete after :meth:`finalize`. ``is_peft_format`` writes one file for an adapter.
    """

    def __init__(
        self,
        save_dir: str | PathLike[str],
        max_shard_size: str = "5GB",
        save_rank: Literal["last", "master"] = "last",
        is_peft_format: bool = False,
    ) -> None:
        if save_rank not in ("last", "master"):
            raise InvalidInputError("save_rank", save_rank, "'last' or 'master'")
        launch = read_launch()
        writer = 0 if save_rank == "master" else launch.world_size - 1
        self.is_save_rank = max(0, launch.rank) == writer
        self._folder = Path(save_dir)
        self._most_bytes = float("inf") if is_peft_format else _bytes_of(max_shard_size)
        self._is_adapter = is_peft_format
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._places: dict[str, int] = {}  # the number of each tensor's file
        self._total_bytes = self._shards = 0

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. A sharded one becomes whole, so all ranks must add it."""
        whole = to_local_tensor(tensor.detach())
        if not self.is_save_rank:
            return
        if name in self._places or name in self._pending:
            raise InvalidInputError("name", name, "a tensor that was not added before")
        size = whole.numel() * whole.element_size()
        if self._pending and self._pending_bytes + size > self._most_bytes:
            self._write()
        # a copy: safetensors refuses tensors that share memory, and the model may change this one
        self._pending[name] = whole.to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def finalize(self) -> None:
        """Write what is left, give the files their final names and write the index if there are several."""
        if not self.is_save_rank:
            return
        if self._pending or not self._shards:
            self._write()
        if self._shards == 1:
            self._temporary(1).replace(self._folder / (_ADAPTER if self._is_adapter else _MODEL))
            return
        names = {n: f"model-{n:05d}-of-{self._shards:05d}.safetensors" for n in range(1, self._shards + 1)}
        for number, file in names.items():
            self._temporary(number).replace(self._folder / file)
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": {name: names[number] for name, number in self._places.items()},
        }
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._shards += 1
        save_file(self._pending, self._temporary(self._shards), metadata={"format": "pt"})
        self._places.update(dict.fromkeys(self._pending, self._shards))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, number: int) -> Path:
        """Return the name of a file while it is not known how many there will be."""
        return self._folder / f".model-{number:05d}.safetensors.part"


def copy_files_by_pattern(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    patterns: str | Iterable[str],
    exclude_patterns: str | Iterable[str] | None = None,
) -> None:
    """Copy the files of a directory whose names match a pattern such as ``*.json``. Existing files are kept."""
    wanted, unwanted = _listed(patterns), _listed(exclude_patterns or ())
    target = Path(dst)
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(src).iterdir()):
        matches = any(fnmatch(file.name, each) for each in wanted)
        if not file.is_file() or not matches or any(fnmatch(file.name, each) for each in unwanted):
            continue
        if not (target / file.name).exists():
            shutil.copy2(file, target / file.name)


def _listed(patterns: str | Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _bytes_of(size: str) -> float:
    try:
        count = float(size.removesuffix("GB")) if size.endswith("GB") else 0.0
    except ValueError:
        count = 0.0
    if not count > 0:
        raise InvalidInputError("max_shard_size", size, "a size that ends in GB, such as '5GB'")
    return count * _BYTES_OF_GB
