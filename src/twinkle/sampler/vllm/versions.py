"""Versions of adapters for vLLM: files in memory, and for each version a name and a number that no other ever had.

vLLM's caches go by name, so a version that changed under its name would be sampled from with another one's prefixes.
Files stay while anybody may need them: vLLM reads them again when it has dropped a version.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from twinkle.errors import CapacityError, InvalidInputError, TwinkleServerError, UnsupportedError
from twinkle.model.adapters.checkpoint import CONFIG, WEIGHTS

_PREFIX = "twinkle-vllm-"
_SPARE_BYTES = 2**20


@dataclass(eq=False)
class Version:
    """``lora=None``: the adapter changes nothing, and the base model is sampled from.

    ``users``: generations that vLLM has not ended yet. It may read the files for each, and dies if they are gone.
    """

    lora: LoRARequest | None
    directory: Path
    users: int = 0
    retired: bool = False


class VersionFiles:
    """A directory of this process's own in ``place``, which should be in memory."""

    def __init__(self, place: Path) -> None:
        if not place.is_dir():
            allowed = "a directory in memory (a tmpfs), where vLLM's processes find the versions"
            raise InvalidInputError("memory_dir", str(place), allowed)
        _remove_left_behind(place)
        try:
            self.root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
        except OSError as error:
            raise TwinkleServerError(f"memory_dir: cannot write to {place}: {error}") from error
        self._numbers = count(1)

    def write(self, size: int, write: Callable[[Path], None], unapplied: frozenset[str]) -> Version:
        """``write`` fills a directory in PEFT's format, of about ``size`` bytes.

        unapplied: names of modules that vLLM cannot apply; they are refused unless they change nothing.
        """
        free = shutil.disk_usage(self.root).free
        if size + _SPARE_BYTES > free:
            raise CapacityError(
                f"{self.root.parent} has {free / 2**20:.0f} MiB left for versions, {size / 2**20:.0f} are needed: "
                "name a larger memory_dir"
            )
        number = next(self._numbers)
        directory = self.root / f"v{number}"
        try:
            write(directory)
            modules = _leave_out(directory, unapplied)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        lora = LoRARequest(directory.name, number, str(directory)) if modules else None
        return Version(lora, directory)

    def remove(self, version: Version) -> None:
        shutil.rmtree(version.directory, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def copy_version(source: Path, directory: Path) -> None:
    """The files that vLLM reads, without what PEFT may have put beside them."""
    directory.mkdir()
    shutil.copyfile(source / CONFIG, directory / CONFIG)
    tensors = load_file(source / WEIGHTS)
    save_file({name: tensor for name, tensor in tensors.items() if ".lora_" in name}, directory / WEIGHTS)


def write_version(config: Mapping[str, object], weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """The same of weights that are in memory."""
    directory.mkdir()
    (directory / CONFIG).write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / WEIGHTS)


def require_rank(rank: int, most: int) -> None:
    if rank > most:
        raise UnsupportedError(
            f"rank: the adapter has {rank}, the vLLM sampler was started for {most} at most; "
            "raise engine_args.max_lora_rank, or use sampler_type torch"
        )


def _leave_out(directory: Path, unapplied: frozenset[str]) -> bool:
    """Drop modules that vLLM cannot apply and that change nothing; returns whether any module is left."""
    tensors = load_file(directory / WEIGHTS)
    by_module: dict[str, list[str]] = {}
    for name in tensors:
        by_module.setdefault(name.rpartition(".lora_")[0].rpartition(".")[2], []).append(name)
    dropped = by_module.keys() & unapplied
    felt = sorted(one for one in dropped if any(_is_felt(name, tensors[name]) for name in by_module[one]))
    if felt:
        raise UnsupportedError(
            f"vLLM does not apply LoRA on {', '.join(felt)} of this model: train without it "
            "(train_unembed=False where it is the head), or use sampler_type torch"
        )
    if dropped:
        gone = {name for one in dropped for name in by_module[one]}
        save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, directory / WEIGHTS)
        config = json.loads((directory / CONFIG).read_text())
        config["target_modules"] = [one for one in config["target_modules"] if one.rpartition(".")[2] not in dropped]
        (directory / CONFIG).write_text(json.dumps(config))
    return len(by_module) > len(dropped)


def _is_felt(name: str, tensor: torch.Tensor) -> bool:
    return ".lora_B." in name and bool(tensor.any())


def _remove_left_behind(place: Path) -> None:
    """Of processes that were killed."""
    for path in place.glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
