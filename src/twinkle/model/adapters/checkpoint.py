"""Adapters on disk: PEFT's files for the weights, safetensors and JSON for the rest. This module uses no pickle.

    adapter_config.json         PEFT's LoraConfig
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight (rank, in) and .lora_B.weight (out, rank), fp32
    optimizer.safetensors       exp_avg.<same names> and exp_avg_sq.<same names>: the optimizer's first and second row
                                of state, for Adam its moments; absent if saved without the optimizer
    trainer_state.json          counts of steps and training passes, optimizer, spec and base model
    USAGE.md                    only if the adapter trains the output head: which programs apply that part

A directory appears complete or not at all: it is written under a temporary name beside its place (".NAME.*.tmp", which
a crash may leave behind), flushed, then renamed. A directory that is overwritten is swapped with the new one
atomically, where the operating system can do that.
"""

import ctypes
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from twinkle.errors import CheckpointError, InvalidInputError, NoOptimizerStateError
from twinkle.model.adapters.adapter import ADAM, Adapter
from twinkle.model.adapters.expert_forms import for_training, has_experts, is_ours, is_tinkers
from twinkle.model.adapters.optimizer import OPTIMIZERS
from twinkle.model.adapters.peft_config import NOTE, READ, head_note, peft_config, spec_from_peft, trains_head
from twinkle.model.decoder.lora.stacks import RowLayout, Target
from twinkle.model.types import EMPTY, FloatArray, LoraSpec, text_name
from twinkle.model.weights.tensor_files import write_arrays

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"
FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
# Fields of PEFT's config that only matter for new weights. They are ignored when trained weights are read.
_FOR_NEW_WEIGHTS = {"init_lora_weights": READ["init_lora_weights"]}
# PEFT writes copies of the model's own embeddings beside LoRA on the head.
_BASE_COPIES = (".base_layer.weight", ".embed_tokens.weight")
# Constants of Linux's renameat2(2): AT_FDCWD, and the flag that swaps two paths.
_CURRENT_DIRECTORY = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class TrainingState:
    """The counts, and the part of the optimizer's state, that stand in trainer_state.json."""

    step: int = 0
    passes: int = 0
    optimizer: str = ADAM
    scalars: Mapping[str, float] = field(default_factory=dict)


NEW_STATE = TrainingState()


def save_adapter(
    adapter: Adapter,
    directory: Path,
    *,
    target_modules: list[str],
    base_model: str,
    optimizer: bool,
    overwrite: bool,
    state: Mapping[str, object] = EMPTY,
    companions: Callable[[Path], None] | None = None,
    synced: bool = True,
) -> None:
    """Write an adapter to a directory.

    ``state``: further entries of trainer_state.json. ``companions``: a function that writes further files into the
    directory it is given. ``synced``: see :func:`write_whole`.
    """

    def write(staging: Path) -> None:
        _write_files(adapter, staging, target_modules, base_model, optimizer, state)
        if companions is not None:
            companions(staging)

    write_whole(directory, write, overwrite=overwrite, synced=synced)


def _system_error(error: OSError | SafetensorError) -> Exception:
    """Return an error of the operating system as an OSError: safetensors has its number only in its message."""
    found = None if isinstance(error, OSError) else re.search(r"\(os error (\d+)\)", str(error))
    return error if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def write_whole(directory: Path, write: Callable[[Path], None], *, overwrite: bool, synced: bool = True) -> None:
    """Write a directory atomically: ``write`` fills a temporary one, which replaces ``directory`` once on disk.

    With ``synced=False`` it may still be in the memory of the operating system when this returns. It then survives the
    death of this process, but not a power failure in the next half minute.
    """
    directory = directory.resolve()  # if it is a link, the directory it points to is replaced
    if directory.exists() and not (overwrite and directory.is_dir()):
        raise CheckpointError(f"directory: {directory} exists already; choose another name or pass overwrite=True")
    staging = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.tmp")
    try:
        staging.mkdir(parents=True)
        write(staging)
        for path in (*staging.rglob("*"), staging) if synced else ():
            _flush(path)
        _put_in_place(staging, directory)
        if synced:
            _flush(directory.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not write {directory}: {error}") from _system_error(error)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_spec(directory: Path) -> LoraSpec:
    """Return the spec of an adapter saved by Twinkle or by PEFT, or in a form of :mod:`expert_forms`."""
    config, path = read_json(directory / CONFIG), directory / WEIGHTS
    if path.exists() and not is_ours(config, _read_shapes(path)):
        config, _ = _converted(config, _read_tensors(path), None, directory)
    return _spec_in(config, directory)


def _spec_in(config: Mapping[str, object], directory: Path) -> LoraSpec:
    try:
        return spec_of(config)
    except InvalidInputError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error}") from error


def _converted(
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    shared_outer: bool | None,
    source: Path | str,
    *,
    alternating: bool = False,
) -> tuple[dict[str, object], dict[str, Tensor]]:
    try:
        return for_training(config, tensors, shared_outer, alternating=alternating)
    except (CheckpointError, InvalidInputError) as error:
        raise CheckpointError(f"{source}: {error}") from error


def _fitting(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], layout: RowLayout, source: Path | str
) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
    """Return an adapter in the form of a layout: where it is on experts, Tinker's or PEFT's."""
    wanted = None
    if layout.has_experts:
        wanted = not any(target.is_parameter for target in layout.targets)
    fits = is_ours(config, {name: each.shape for name, each in tensors.items()})
    if fits and (wanted is None or not has_experts(tensors) or is_tinkers(tensors) == wanted):
        return config, tensors
    alternating = any(target.alternates for target in layout.targets)
    return _converted(config, tensors, wanted, source, alternating=alternating)


def spec_of(config: Mapping[str, object]) -> LoraSpec:
    """Return the spec of a trained adapter from the contents of its adapter_config.json."""
    return spec_from_peft({**config, **_FOR_NEW_WEIGHTS})


def with_one_rank(
    config: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return an equivalent adapter without rank and alpha patterns, for programs that do not know them.

    Each module's scaling is multiplied into its B, and all A and B are padded with zeros to the largest rank.
    """
    spec = spec_of(config)
    modules = [name.partition(".lora_")[0].removeprefix("base_model.model.") for name in tensors]
    scalings, most = spec.module_scalings(modules), max(spec.module_ranks(modules))
    padded = {}
    for (name, tensor), scaling in zip(tensors.items(), scalings, strict=True):
        if ".lora_A." in name:
            padded[name] = pad(tensor, (0, 0, 0, most - tensor.shape[0]))
        else:
            padded[name] = pad(tensor * scaling, (0, most - tensor.shape[1]))
    plain = {"r": most, "lora_alpha": most, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    return {**config, **plain}, padded


def put_weights(adapter: Adapter, tensors: Mapping[str, Tensor]) -> None:
    """Replace the weights of an adapter by tensors with PEFT's names, in the adapter's own form."""
    adapter.weights_P.copy_(_row(tensors, adapter, "", "weights"))


def load_adapter(adapter: Adapter, directory: Path, *, optimizer: bool) -> None:
    """Replace the weights and the optimizer state of an adapter; after an error nothing has changed.

    Without ``optimizer`` that state starts from zero. An accumulated gradient is dropped.
    """
    path = directory / WEIGHTS
    config, tensors = _fitting(read_json(directory / CONFIG), _read_tensors(path), adapter.layout, path)
    _check_shape(adapter, _spec_in(config, directory), directory)
    weights_P = _row(tensors, adapter, "", path)
    state, moments = NEW_STATE, [torch.zeros_like(weights_P) for _ in MOMENTS]
    if optimizer:
        if not (directory / OPTIMIZER).exists():
            raise NoOptimizerStateError(f"{directory} holds no optimizer state; load it with optimizer=False")
        tensors = _read_tensors(directory / OPTIMIZER)
        moments = [_row(tensors, adapter, f"{name}.", directory / OPTIMIZER) for name in MOMENTS]
        state = read_training_state(directory / STATE)
    adapter.weights_P.copy_(weights_P)
    adapter.exp_avg_P.copy_(moments[0])
    adapter.exp_avg_sq_P.copy_(moments[1])
    adapter.step, adapter.passes = state.step, state.passes
    adapter.optimizer, adapter.scalars = state.optimizer, state.scalars
    adapter.drop_gradient()


def _check_shape(adapter: Adapter, spec: LoraSpec, directory: Path) -> None:
    """Raise unless weights of this spec have the same ranks and scalings as the adapter, in each of its modules."""
    own = adapter.spec
    if (spec.rank, spec.alpha) != (own.rank, own.alpha) and not (spec.rank_pattern or own.rank_pattern):
        raise CheckpointError(
            f"{directory} holds rank {spec.rank}, alpha {spec.alpha:g}; "
            f"adapter {adapter.adapter_id!r} has rank {own.rank}, alpha {own.alpha:g}"
        )
    names = [target.name for target in adapter.layout.targets]
    stored, wanted = (
        list(zip(each.module_ranks(names), each.module_scalings(names), strict=True)) for each in (spec, own)
    )
    for name, (rank, scaling), (own_rank, own_scaling) in zip(names, stored, wanted, strict=True):
        if rank != own_rank or not math.isclose(scaling, own_scaling):
            raise CheckpointError(
                f"{directory} holds rank {rank}, scaling {scaling:g} for {name}; "
                f"adapter {adapter.adapter_id!r} has rank {own_rank}, scaling {own_scaling:g} there"
            )


def _write_files(
    adapter: Adapter,
    staging: Path,
    target_modules: list[str],
    base_model: str,
    optimizer: bool,
    more_state: Mapping[str, object],
) -> None:
    spec, layout = adapter.spec, adapter.layout
    names = [target.name for target in layout.targets]
    write_json(staging / CONFIG, peft_config(spec, target_modules, base_model, names))
    write_arrays(staging / WEIGHTS, _named_arrays(adapter.weights_P, spec, layout, ""))
    if trains_head(names):
        (staging / NOTE).write_text(head_note(base_model))
    if optimizer:
        moments = _named_arrays(adapter.exp_avg_P, spec, layout, "exp_avg.") | _named_arrays(
            adapter.exp_avg_sq_P, spec, layout, "exp_avg_sq."
        )
        write_arrays(staging / OPTIMIZER, moments)
    state = {
        "format": FORMAT,
        "step": adapter.step,
        "passes": adapter.passes,
        "optimizer": adapter.optimizer,
        "scalars": dict(adapter.scalars),
        "spec": asdict(spec),
        "base_model": base_model,
    }
    write_json(staging / STATE, {**more_state, **state})


def _put_in_place(staging: Path, directory: Path) -> None:
    """Rename ``staging`` to ``directory`` and delete what was there; if this fails, the old directory stays."""
    if not directory.exists():
        os.replace(staging, directory)
    elif not _exchange(staging, directory):
        retired = staging.with_suffix(".old")
        os.replace(directory, retired)
        try:
            os.replace(staging, directory)
        except OSError:
            os.replace(retired, directory)
            raise
        shutil.rmtree(retired, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories atomically; return False if the operating system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    here = _CURRENT_DIRECTORY
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(target: Target, layout: RowLayout) -> tuple[str, str]:
    """Return the names of A and B. PEFT names experts' parameters by their module, which it wraps once for each."""
    module = target.name
    if target.is_parameter:
        experts, _, parameter = module.rpartition(".")
        wrapped_again = parameter == "gate_up_proj" and layout.has(f"{experts}.down_proj")
        module = f"{experts}.base_layer" if wrapped_again else experts
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _named_arrays(row_P: Tensor, spec: LoraSpec, layout: RowLayout, prefix: str) -> dict[str, FloatArray]:
    """Return the parts of an adapter's fp32 row as :func:`named_tensors` does, by means of NumPy alone.

    Each call of torch lets other threads of the process run, which takes long in a busy server.
    """
    arrays, row = {}, row_P.cpu().numpy()
    for target, rank in _with_ranks(spec, layout):
        a, b = layout.offsets(target.name)
        bucket = layout.bucket(target.name)
        a_front, b_front = target.experts_of_a, target.experts_of_b
        a_name, b_name = _names(target, layout)
        a_array = row[a : a + bucket * target.a_rows].reshape(*a_front, bucket, target.in_features)[..., :rank, :]
        b_array = row[b : b + bucket * target.b_rows].reshape(*b_front, target.out_features, bucket)[..., :rank]
        if target.is_parameter:  # PEFT's A is ordered by expert, its B by rank first
            a_array = a_array.reshape(-1, target.in_features)
            b_array = b_array.transpose(1, 2, 0).reshape(target.out_features, -1)
        arrays[prefix + a_name], arrays[prefix + b_name] = a_array, b_array
    return arrays


def named_tensors(row_P: Tensor, spec: LoraSpec, layout: RowLayout) -> dict[str, Tensor]:
    """Return the parts of an adapter's row by PEFT's parameter names, without the padding to rank buckets."""
    tensors, row_P = {}, row_P.cpu()
    for target, rank in _with_ranks(spec, layout):
        a_RI, b_OR = layout.views(row_P, target.name)
        a_RI, b_OR = a_RI[..., :rank, :], b_OR[..., :rank]
        if target.is_parameter:
            a_RI, b_OR = a_RI.flatten(0, 1), b_OR.permute(1, 2, 0).flatten(1)
        a_name, b_name = _names(target, layout)
        tensors[a_name], tensors[b_name] = a_RI.contiguous(), b_OR.contiguous()
    return tensors


def named_shapes(spec: LoraSpec, layout: RowLayout) -> dict[str, tuple[int, ...]]:
    """Return the shapes of :func:`named_tensors`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target, rank in _with_ranks(spec, layout):
        a_name, b_name = _names(target, layout)
        shapes[a_name], shapes[b_name] = _shapes(target, rank)
    return shapes


def _shapes(target: Target, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of A and B in files."""
    if target.is_parameter:
        (count,) = target.experts_of_a
        return (count * rank, target.in_features), (target.out_features, rank * count)
    return (*target.experts_of_a, rank, target.in_features), (*target.experts_of_b, target.out_features, rank)


def _with_ranks(spec: LoraSpec, layout: RowLayout) -> Iterable[tuple[Target, int]]:
    """Return the target modules of a layout with their ranks."""
    return zip(layout.targets, spec.module_ranks([target.name for target in layout.targets]), strict=True)


def _row(tensors: Mapping[str, Tensor], adapter: Adapter, prefix: str, path: Path | str) -> Tensor:
    """Return the row of an adapter whose tensors have PEFT's names, in the form of the text or of the vision model."""
    layout = adapter.layout
    names = [tuple(map(text_name, _names(target, layout))) for target in layout.targets]
    expected = {prefix + name for pair in names for name in pair}
    given = [name for name in tensors if name.startswith(prefix) and not name.endswith(_BASE_COPIES)]
    found = {_in_layout(text_name(name), expected): tensors[name] for name in given}
    if len(found) != len(given):
        raise CheckpointError(f"{path} names modules both with and without language_model")
    if found.keys() != expected:
        missing, extra = sorted(expected - found.keys())[:3], sorted(found.keys() - expected)[:3]
        raise CheckpointError(
            f"{path} does not fit the adapter's target modules; missing {missing}, unexpected {extra}"
        )
    row_P = torch.zeros(layout.size)
    for target, rank, pair in zip(layout.targets, adapter.ranks, names, strict=True):
        for name, shape in zip(pair, _shapes(target, rank), strict=True):
            tensor = found[prefix + name]
            if tensor.shape != shape or not tensor.is_floating_point():
                raise CheckpointError(
                    f"{path}: {prefix + name} is {tensor.dtype} {tuple(tensor.shape)}, expected floats {shape}"
                )
            if not tensor.to(row_P.dtype).isfinite().all():
                raise CheckpointError(f"{path}: {prefix + name} holds NaN or infinity")
        a, b = (found[prefix + name] for name in pair)
        if target.is_parameter:
            (count,) = target.experts_of_a
            a, b = a.unflatten(0, (count, rank)), b.unflatten(1, (rank, count)).permute(2, 0, 1)
        a_RI, b_OR = layout.views(row_P, target.name)
        a_RI[..., :rank, :].copy_(a)
        b_OR[..., :rank].copy_(b)
    return row_P


def _in_layout(name: str, expected: set[str]) -> str:
    """Return the name that our own files have: in Tinker's files, the attention of gpt-oss is ``attn``."""
    ours = name.replace(".attn.", ".self_attn.", 1)
    return ours if ours in expected and name not in expected else name


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not read {path}: {error}") from error


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors without reading these."""
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not read {path}: {error}") from error


def read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"could not read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def read_training_state(path: Path) -> TrainingState:
    """Return the state that stands beside the rows.

    Older checkpoints name no optimizer, which was Adam then, and no number of training passes.
    """
    state = read_json(path)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format: got {state.get('format')!r}, allowed: {FORMAT}")
    step, passes = _count(path, "step", state.get("step")), _count(path, "passes", state.get("passes", 0))
    name, scalars = state.get("optimizer", ADAM), state.get("scalars", {})
    if not isinstance(name, str) or name not in (ADAM, *OPTIMIZERS):
        raise CheckpointError(f"{path}: optimizer: got {name!r}, allowed: {', '.join((ADAM, *OPTIMIZERS))}")
    expected = set() if name == ADAM or step == 0 else set(OPTIMIZERS[name].scalars)
    if not isinstance(scalars, dict) or set(scalars) != expected or not all(map(_is_finite, scalars.values())):
        raise CheckpointError(f"{path}: scalars: got {scalars!r}, allowed: numbers named {sorted(expected)}")
    return TrainingState(step, passes, name, scalars)


def _count(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"{path}: {name}: got {value!r}, allowed: an integer ≥ 0")
    return value


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
