"""Adapter versions for vLLM: files in memory, and for each version a name and a number that are never used again.

vLLM's caches go by name: if a version changed under the same name, vLLM would use cached prefixes of the old weights.
Files stay as long as vLLM may need them, because it reads them again after it has dropped a version from its memory.
Weights are written once, in the precision in which vLLM computes. Otherwise vLLM would round them in the same way while
it reads them, and it does not decode meanwhile.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.lora.request import LoRARequest

from twinkle.errors import CapacityError, InvalidInputError, TwinkleServerError, UnsupportedError
from twinkle.model.adapters.checkpoint import CONFIG, WEIGHTS, with_one_rank
from twinkle.model.adapters.expert_exports import convert
from twinkle.model.adapters.expert_forms import has_experts
from twinkle.model.adapters.linear_attention_forms import with_joint_projections
from twinkle.model.decoder.linear_attention.layer import JOINT
from twinkle.model.decoder.lora.stacks import Target
from twinkle.model.weights.tensor_files import write_at_once

EXPERTS = "experts"  # stands among the kinds of modules for all projections of all experts
_PREFIX = "twinkle-vllm-"
_FRONT = "base_model.model."  # of the names of PEFT's tensors
_GATE = "in_proj_z"  # of linear attention; vLLM joins it with its query, key and value
_SPARE_BYTES = 2**20


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter in memory: the contents of its adapter_config.json, and its weights on the host by PEFT's names."""

    config: Mapping[str, object]
    tensors: Mapping[str, torch.Tensor]

    @property
    def rank(self) -> int:
        rank = self.config["r"]
        assert isinstance(rank, int), "PEFT's config has a number"
        return rank


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


@dataclass(frozen=True)
class Partner:
    """The linear layer that vLLM joins with another one: its name in the base model, and the size of its output."""

    name: str
    out_features: int


def partners_of(targets: Iterable[Target]) -> dict[str, Partner]:
    """Return the pairs of linear layers that vLLM joins, and of which it cannot load an adapter for one alone.

    They are in linear attention. Of other joined layers it takes any.
    """
    by_name = {target.name: target for target in targets}
    pairs = [(name, f"{name.removesuffix(JOINT)}{_GATE}") for name in by_name if name.endswith(f".{JOINT}")]
    both = [pair for one, other in pairs if other in by_name for pair in ((one, other), (other, one))]
    return {one: Partner(other, by_name[other].out_features) for one, other in both}


class VersionFiles:
    """A private directory of this process for version files. It is made in ``place``, which should be a tmpfs."""

    def __init__(
        self,
        place: Path,
        dtype: torch.dtype,
        experts_form: str | None = None,
        *,
        alternating: bool = False,
        partners: Mapping[str, Partner] | None = None,
    ) -> None:
        """``dtype``: the precision in which vLLM computes with adapters.

        experts_form: the form in which it reads adapters on the experts of this model; None: in none. alternating:
        whether the outputs of gate and up stand in turns in the weights of its experts. partners: for the names of
        linear layers that vLLM knows only in pairs, the other of the pair.
        """
        if not place.is_dir():
            allowed = "a directory in memory (a tmpfs), where vLLM's processes find the versions"
            raise InvalidInputError("memory_dir", str(place), allowed)
        _remove_left_behind(place)
        try:
            self.root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
        except OSError as error:
            raise TwinkleServerError(f"memory_dir: cannot write to {place}: {error}") from error
        self._dtype = dtype
        self._experts_form = experts_form
        self._alternating = alternating
        self._partners = partners or {}
        self._numbers = count(1)

    def write(self, adapter: AdapterWeights, unapplied: frozenset[str], max_rank: int | None = None) -> Version:
        """Make a new version.

        unapplied: names of modules on which vLLM cannot apply LoRA. A version with LoRA on them is refused unless that
        LoRA has no effect. max_rank: the largest rank that vLLM was started for. Projections that are one for vLLM
        need more than the adapter has: those of linear attention, and gate and up of experts.
        """
        own_rank = _largest_rank(adapter.config)
        adapter = AdapterWeights(*with_joint_projections(adapter.config, adapter.tensors))
        adapter = _without_experts(adapter) if self._experts_form is None or EXPERTS in unapplied else adapter
        if has_experts(adapter.tensors):
            assert self._experts_form is not None, "adapters on experts are refused above"
            form, alternating = self._experts_form, self._alternating
            adapter = AdapterWeights(*convert(adapter.config, adapter.tensors, form, alternating=alternating))
        adapter = _with_partners(_with_one_rank(adapter), self._partners)
        if max_rank is not None:
            require_rank(adapter.rank, max_rank, own_rank)
        config, tensors = _without_modules(adapter, unapplied)
        tensors = {name: tensor.to(self._dtype) for name, tensor in tensors.items()}
        size, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(self.root).free
        if size + _SPARE_BYTES > free:
            raise CapacityError(
                f"{self.root.parent} has {free / 2**20:.0f} MiB left for versions, {size / 2**20:.0f} are needed: "
                "name a larger memory_dir"
            )
        number = next(self._numbers)
        directory = self.root / f"v{number}"
        directory.mkdir()
        try:
            (directory / CONFIG).write_text(json.dumps(config, default=sorted))  # PEFT has sets of names
            write_at_once(directory / WEIGHTS, self._dtype, tensors)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return Version(LoRARequest(directory.name, number, str(directory)) if tensors else None, directory)

    def remove(self, version: Version) -> None:
        shutil.rmtree(version.directory, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def read_adapter(source: Path) -> AdapterWeights:
    """Read an adapter in PEFT's format, without tensors that PEFT may have saved beside the LoRA weights."""
    tensors = load_file(source / WEIGHTS)
    lora = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
    return AdapterWeights(json.loads((source / CONFIG).read_text()), lora)


def require_rank(rank: int, most: int, own: int | None = None) -> None:
    """Raise UnsupportedError if a rank is too large for the engine. own: the adapter's rank, if layers are joined."""
    if rank <= most:
        return
    has = str(rank)
    if own is not None and own != rank:
        has = f"{own}, which becomes {rank} because vLLM joins some of its layers"
    raise UnsupportedError(
        f"rank: the adapter has {has}; the vLLM sampler was started for {most} at most; "
        "raise engine_args.max_lora_rank, or use sampler_type torch"
    )


def _largest_rank(config: Mapping[str, object]) -> int:
    pattern = config.get("rank_pattern") or {}
    ranks = [config["r"], *(pattern.values() if isinstance(pattern, Mapping) else ())]
    return max(rank for rank in ranks if isinstance(rank, int))


def _with_one_rank(adapter: AdapterWeights) -> AdapterWeights:
    """Return an adapter whose modules have one rank and one alpha, because vLLM knows one of each.

    This changes the result by rounding only.
    """
    if not (adapter.config.get("rank_pattern") or adapter.config.get("alpha_pattern")):
        return adapter
    return AdapterWeights(*with_one_rank(adapter.config, adapter.tensors))


def _with_partners(adapter: AdapterWeights, partners: Mapping[str, Partner]) -> AdapterWeights:
    """Add LoRA of zeros on the missing partners, and name them in the config."""
    tensors, added = dict(adapter.tensors), dict[str, str]()
    for name, a_RI in adapter.tensors.items():
        front, found, rest = name.partition(".lora_A.")
        own = front.removeprefix(_FRONT)
        partner = partners.get(own) if found else None
        if partner is not None and f"{_FRONT}{partner.name}{found}{rest}" not in tensors:
            tensors[f"{_FRONT}{partner.name}{found}{rest}"] = torch.zeros_like(a_RI)
            tensors[f"{_FRONT}{partner.name}.lora_B.{rest}"] = a_RI.new_zeros(partner.out_features, len(a_RI))
            added[own.rpartition(".")[2]] = partner.name.rpartition(".")[2]
    if not added:
        return adapter
    modules = set(_target_modules(adapter.config))
    fronts_and_lasts = [(front + dot, last) for front, dot, last in (name.rpartition(".") for name in modules)]
    modules |= {front + added[last] for front, last in fronts_and_lasts if last in added}
    return AdapterWeights({**adapter.config, "target_modules": sorted(modules)}, tensors)


def _target_modules(config: Mapping[str, object]) -> list[str]:
    modules = config.get("target_modules")
    if modules is None or isinstance(modules, str):
        raise UnsupportedError(f"target_modules: got {modules!r}, allowed: a list of the names of modules")
    assert isinstance(modules, Iterable), "PEFT's config has a list or a set of names"
    return list(modules)


def _without_modules(
    adapter: AdapterWeights, unapplied: frozenset[str]
) -> tuple[Mapping[str, object], Mapping[str, torch.Tensor]]:
    """Remove modules on which vLLM cannot apply LoRA, if their LoRA has no effect because B is zero.

    Raise UnsupportedError if LoRA on one of these modules has an effect.
    """
    config, tensors = adapter.config, adapter.tensors
    by_module: dict[str, list[str]] = {}
    for name in tensors:
        if not has_experts([name]):  # the names of an expert's projections are those of linear layers elsewhere
            by_module.setdefault(name.rpartition(".lora_")[0].rpartition(".")[2], []).append(name)
    dropped = by_module.keys() & unapplied
    felt = sorted(one for one in dropped if any(_is_felt(name, tensors[name]) for name in by_module[one]))
    if felt:
        raise UnsupportedError(
            f"vLLM does not apply LoRA on {', '.join(felt)} of this model: train without it "
            "(train_unembed=False where it is the head), or use sampler_type torch"
        )
    if not dropped:
        return config, tensors
    gone = {name for one in dropped for name in by_module[one]}
    kept = [one for one in _target_modules(config) if one.rpartition(".")[2] not in dropped]
    return {**config, "target_modules": kept}, {name: each for name, each in tensors.items() if name not in gone}


def _without_experts(adapter: AdapterWeights) -> AdapterWeights:
    """Remove what an adapter has on experts, if that has no effect because B is zero; else raise UnsupportedError."""
    on_experts = {name for name in adapter.tensors if has_experts([name])}
    if any(_is_felt(name, adapter.tensors[name]) for name in on_experts):
        raise UnsupportedError(
            "vLLM does not apply LoRA on the experts of this model (on a CPU, it never does): train with "
            "train_mlp=False, or use sampler_type torch"
        )
    return AdapterWeights(
        adapter.config, {name: each for name, each in adapter.tensors.items() if name not in on_experts}
    )


def _is_felt(name: str, tensor: torch.Tensor) -> bool:
    return ".lora_B." in name and bool(tensor.any())


def _remove_left_behind(place: Path) -> None:
    """Remove directories of processes that no longer exist."""
    for path in place.glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
