"""The files of a checkpoint beside the weights, with which training continues where it stopped.

    optimizer.pt         the optimizer's state_dict (multi-LoRA: its settings; moments are in optimizer.safetensors)
    scheduler.pt         the learning-rate scheduler's state_dict, if there is one
    window.pt            the gradient of a window that is not complete, if there is one
    rng_state.pt         states of the random generators of Python, NumPy and torch
    trainer_state.json   {checkpoint_version, cur_step, gradient_accumulation_steps, consumed_train_samples, num_tokens,
                         optimizer_class, lr_scheduler_class}

The .pt files hold only tensors and plain values. They are read with ``weights_only``, which runs no code.
"""

import logging
import random
import shutil
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from twinkle import hub
from twinkle.errors import CheckpointError, InvalidInputError, UserError
from twinkle.hub import HubOperation
from twinkle.model.adapters.checkpoint import STATE, read_json
from twinkle.model.library.optimizer_group import OptimizerGroup
from twinkle.model.parallel import Ranks
from twinkle.model.trainer.sharding import sharded_state, whole_state

logger = logging.getLogger(__name__)

OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
WINDOW = "window.pt"
RNG = "rng_state.pt"
_VERSION = 1


def checkpoint_path(group: OptimizerGroup, name: str | None, output_dir: str | PathLike[str] | None) -> Path:
    return Path(output_dir or "output") / (name or f"checkpoint-step-{group.cur_step}")


def is_due(group: OptimizerGroup, interval: int) -> bool:
    """Return whether ``save`` writes now: the number of backward passes is 0 or a multiple of ``interval``."""
    if not isinstance(interval, int) or interval < 1:
        raise InvalidInputError("interval", interval, "an integer ≥ 1")
    return group.cur_step % interval == 0


def progress(group: OptimizerGroup, consumed_train_samples: int, ranks: Ranks) -> dict[str, object]:
    """Return the contents of trainer_state.json. Tokens are summed over ranks, so all ranks must call this."""
    return {
        "checkpoint_version": _VERSION,
        "cur_step": group.cur_step,
        "gradient_accumulation_steps": group.gradient_accumulation_steps,
        "consumed_train_samples": consumed_train_samples,
        "num_tokens": ranks.total(group.train_status.num_tokens),
        "optimizer_class": None if group.optimizer is None else type(group.optimizer).__name__,
        "lr_scheduler_class": None if group.lr_scheduler is None else type(group.lr_scheduler).__name__,
    }


def read_progress(directory: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint_dir: there is no directory {directory}")
    state = read_json(directory / STATE) if (directory / STATE).exists() else {}
    if missing_ok and "checkpoint_version" not in state:  # a checkpoint of weights only: training starts from zero
        return {"cur_step": 0, "consumed_train_samples": 0, "gradient_accumulation_steps": 1}
    if state.get("checkpoint_version", _VERSION) != _VERSION:
        raise CheckpointError(
            f"{directory / STATE}: checkpoint_version: got {state['checkpoint_version']!r}, allowed: {_VERSION}"
        )
    if "checkpoint_version" not in state:
        raise CheckpointError(
            f"{directory / STATE} holds no training progress: it was saved without save_optimizer=True, or not by the "
            "library's own verbs; load() takes its weights"
        )
    return state


def check_resumable(directory: Path, group: OptimizerGroup) -> dict[str, Any]:
    """Return the progress of a checkpoint; raise if its optimizer and scheduler do not fit those of the group.

    A file that is missing does not count: :func:`missing_files` names it.
    """
    state = read_progress(directory)
    for file, place, verb in (
        (OPTIMIZER, group.optimizer, "set_optimizer"),
        (SCHEDULER, group.lr_scheduler, "set_lr_scheduler"),
    ):
        if (directory / file).exists() and place is None:
            raise UserError(f"resume_from_checkpoint: {directory} holds {file}; call {verb} first")
        if not (directory / file).exists():
            continue
        saved = state.get(f"{verb.removeprefix('set_')}_class")
        if saved is not None and saved != type(place).__name__:
            raise CheckpointError(f"{directory / file} is of a {saved}; {verb} made a {type(place).__name__}")
    return state


def missing_files(directory: Path, group: OptimizerGroup) -> list[str]:
    """Return the files that the group could read and that the checkpoint does not have."""
    wanted = [(OPTIMIZER, group.optimizer), (SCHEDULER, group.lr_scheduler)]
    return [file for file, place in wanted if place is not None and not (directory / file).exists()]


def say_missing(directory: Path, missing: Sequence[str]) -> None:
    """Log one line about the state that a checkpoint does not have, if any."""
    if missing:
        text = "resume_from_checkpoint: %s has no %s; that state starts anew"
        logger.warning(text, directory, " and no ".join(missing))


def state_values(
    group: OptimizerGroup, window: dict[str, Tensor], *, process_state: bool = True
) -> dict[str, dict[str, Any]]:
    """Return the contents of the .pt files by file name.

    ``window``: gradients by name, empty between windows. ``process_state``: include the states of random generators.
    """
    values: dict[str, dict[str, Any]] = {}
    if group.optimizer is not None:
        values[OPTIMIZER] = whole_state(group.optimizer.state_dict())
    if group.lr_scheduler is not None:
        values[SCHEDULER] = plain_scheduler_state(group)
    if window:
        values[WINDOW] = {**window}
    if process_state:
        values[RNG] = _rng_state()
    return values


def load_state(
    directory: Path, group: OptimizerGroup, ranks: Ranks, *, process_state: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restore a group from the files that a checkpoint has. Return the progress, and the gradients of an open window.

    Of optimizer, scheduler and generators, those are restored whose files are there.
    ``process_state``: restore also the random generators of this process, if the checkpoint has their states.
    """
    state = read_progress(directory)
    missing = missing_files(directory, group)
    if group.optimizer is not None and OPTIMIZER not in missing:
        _load_optimizer(group.optimizer, directory / OPTIMIZER)
    if group.lr_scheduler is not None and SCHEDULER not in missing:
        group.lr_scheduler.load_state_dict(_load(directory / SCHEDULER))
    window = _load(directory / WINDOW) if (directory / WINDOW).exists() else {}
    if process_state and (directory / RNG).exists():  # a server saves none, since all its tenants share the generators
        _restore_rng(_load(directory / RNG))
    group.cur_step = int(state["cur_step"])
    group.set_accumulation(int(state["gradient_accumulation_steps"]))
    group.drop_window()
    group.train_status.clear()
    if window and ranks.number == 0:  # rank 0 takes the whole window; the other ranks start with none of it
        group.train_status.num_tokens = float(state["num_tokens"])
    return state, window


def summary(state: dict[str, Any]) -> dict[str, int]:
    """Return the part of a checkpoint's progress that ``resume_from_checkpoint`` returns."""
    names = ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")
    return {name: int(state[name]) for name in names}


def plain_scheduler_state(group: OptimizerGroup) -> dict[str, Any]:
    """Return a scheduler's state without functions, which cannot be stored."""
    assert group.lr_scheduler is not None
    state: dict[str, Any] = group.lr_scheduler.state_dict()
    return {name: value for name, value in state.items() if not callable(value)}


def _load_optimizer(optimizer: Optimizer, path: Path) -> None:
    try:
        optimizer.load_state_dict(sharded_state(_load(path), optimizer))
    except (ValueError, KeyError) as error:  # what torch raises if the parameter groups differ
        raise CheckpointError(f"{path} does not fit the optimizer that is set: {error}") from error


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # it takes the bytes of another kind of file for instructions, and may fail in any way
        raise CheckpointError(f"could not read {path}: {type(error).__name__}: {error}") from error


def _rng_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


def find_checkpoint(name: str | PathLike[str], output_dir: str | PathLike[str] | None, token: str | None) -> Path:
    """Return the directory of a checkpoint: ``name`` in ``output_dir``.

    Without ``output_dir`` it is ``name`` itself or in ``output/``; if neither exists, a ``name`` that contains "/" and
    starts with neither "/" nor "." is downloaded as a hub repository. A path object is never a repository.
    """
    places = [Path(output_dir) / name] if output_dir is not None else [Path(name), Path("output") / name]
    for place in places:
        if place.is_dir():
            return place
    if output_dir is None and isinstance(name, str) and "/" in name and not name.startswith(("/", ".")):
        return Path(HubOperation.download_file(name, token=token))
    raise CheckpointError(f"name: no checkpoint {str(name)!r}; looked for {', '.join(map(str, places))}")


def copy_tokenizer(tokenizer_id: str, directory: Path) -> None:
    """Copy the tokenizer's files, as far as the model has them; existing files are not overwritten."""
    folder = hub.resolve(tokenizer_id).path
    for pattern in _TOKENIZER_FILES:
        for path in folder.glob(pattern):
            if path.is_file() and not (directory / path.name).exists():
                shutil.copyfile(path, directory / path.name)
