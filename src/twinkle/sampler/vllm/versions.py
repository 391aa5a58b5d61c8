"""Adapter versions for vLLM: files in memory, and for each version a name and a number that are never used again.

vLLM's caches go by name: if a version changed under the same name, vLLM would use cached prefixes of the old weights.
Files stay as long as vLLM may need them, because it reads them again after it has dropped a version from its memory.
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
from twinkle.model.adapters.checkpoint import CONFIG, WEIGHTS, with_one_rank

_PREFIX = "twinkle-vllm-"
_SPARE_BYTES = 2**20


@dataclass(eq=False)
class Version:
    """One version in vLLM. ``lora=None``: the adapter has no effect, so the base model is used.

    ``users``: the number of generations that vLLM has not ended yet. vLLM may read the version's files for any of them,
    and its engine dies if they are missing.
    """

    lora: LoRARequest | None
    directory: Path
    users: int = 0
    retired: bool = False


class VersionFiles:
    """A private directory of this process for version files. It is made in ``place``, which should be a tmpfs."""

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
        """Make a new version from a directory in PEFT's format, which ``write`` fills with about ``size`` bytes.

        unapplied: names of modules on which vLLM cannot apply LoRA. A version with LoRA on them is refused unless that
        LoRA has no effect.
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
            _remove_patterns(directory)
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
    """Copy the files that vLLM reads, without tensors that PEFT may have saved beside the LoRA weights."""
    directory.mkdir()
    shutil.copyfile(source / CONFIG, directory / CONFIG)
    tensors = load_file(source / WEIGHTS)
    save_file({name: tensor for name, tensor in tensors.items() if ".lora_" in name}, directory / WEIGHTS)


def write_version(config: Mapping[str, object], weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write the files that vLLM reads from weights in memory."""
    directory.mkdir()
    (directory / CONFIG).write_text(json.dumps(config, default=sorted))  # PEFT has sets of names
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / WEIGHTS)


def _remove_patterns(directory: Path) -> None:
    """Rewrite a version whose modules have different ranks or alphas; vLLM knows one rank and one alpha of an adapter.

    This changes the result by rounding only.
    """
    config = json.loads((directory / CONFIG).read_text())
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        plain, tensors = with_one_rank(config, load_file(directory / WEIGHTS))
        save_file(tensors, directory / WEIGHTS)
        (directory / CONFIG).write_text(json.dumps(plain))


def require_rank(rank: int, most: int) -> None:
    if rank > most:
        raise UnsupportedError(
            f"rank: the adapter has {rank}, the vLLM sampler was started for {most} at most; "
            "raise engine_args.max_lora_rank, or use sampler_type torch"
        )


def _leave_out(directory: Path, unapplied: frozenset[str]) -> bool:
    """Remove modules on which vLLM cannot apply LoRA and whose LoRA has no effect. Return whether any module is left.

    LoRA has no effect while its B is zero. Raise UnsupportedError if LoRA on one of these modules has an effect.
    """
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
    """Remove directories of processes that no longer exist."""
    for path in place.glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
