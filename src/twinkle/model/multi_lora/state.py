"""Saves and resumes one adapter of a trainer together with the state of the library's verbs."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from twinkle.errors import NoOptimizerStateError
from twinkle.model.library.optimizer_group import OptimizerGroup
from twinkle.model.library.training_state import (
    check_resumable,
    copy_tokenizer,
    load_state,
    missing_files,
    progress,
    read_progress,
    state_values,
    summary,
)
from twinkle.model.parallel import ALONE, Ranks
from twinkle.model.types import EMPTY, AdapterSnapshot, FloatArray

_WINDOW_GRADIENT = "gradient"

PutGradient = Callable[[str, FloatArray], None]


class StateTrainer(Protocol):
    """The methods of a :class:`~twinkle.model.Trainer` that saving and resuming use."""

    def prepare_save(
        self,
        adapter_id: str,
        optimizer: bool = True,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
    ) -> Callable[[Path], None]: ...

    def load(self, adapter_id: str, directory: str | Path, optimizer: bool = True) -> None: ...

    def snapshot(self, adapter_id: str) -> AdapterSnapshot: ...

    def restore(self, adapter_id: str, snapshot: AdapterSnapshot) -> None: ...


class LoraState:
    """Saves and resumes adapters.

    ``process_state``: whether checkpoints include the random generators of this process; False if tenants share it.
    ``put_gradient``: sets the whole gradient of an open window; None: with a snapshot of the adapter.
    """

    def __init__(
        self,
        trainer: StateTrainer,
        tokenizer_id: str | None,
        *,
        process_state: bool,
        ranks: Ranks = ALONE,
        put_gradient: PutGradient | None = None,
    ) -> None:
        self._trainer = trainer
        self._put_gradient = put_gradient or self._put_gradient_by_snapshot
        self._ranks = ranks
        self._tokenizer_id = tokenizer_id
        self._process_state = process_state

    def prepare_save(
        self, group: OptimizerGroup, *, save_optimizer: bool, consumed_train_samples: int
    ) -> Callable[[Path], None]:
        """Copy the state of an adapter, and return a function that writes it to a directory.

        The function may be called from any thread; it overwrites an existing directory. All ranks must call this
        method, and one rank calls the function.
        """
        values = {}
        if save_optimizer:
            gradient = self._trainer.snapshot(group.adapter_name).gradient
            window = {} if gradient is None else {_WINDOW_GRADIENT: torch.from_numpy(gradient)}
            values = copy.deepcopy(state_values(group, window, process_state=self._process_state))

        def companions(staging: Path) -> None:
            if self._tokenizer_id is not None:
                copy_tokenizer(self._tokenizer_id, staging)
            for name, value in values.items():
                torch.save(value, staging / name)

        state = progress(group, consumed_train_samples, self._ranks) if save_optimizer else {}
        return self._trainer.prepare_save(group.adapter_name, save_optimizer, state, companions)

    def resume(
        self, group: OptimizerGroup, directory: Path, *, resume_only_model: bool
    ) -> tuple[dict[str, int], list[str]]:
        """Restore an adapter from a checkpoint: its weights only, or with the optimizer and an open window.

        Return its progress, and what state was asked for and is not there; that state starts anew.
        """
        if resume_only_model:
            self._trainer.load(group.adapter_name, directory, optimizer=False)
            group.drop_window()
            return summary(read_progress(directory, missing_ok=True)), []
        check_resumable(directory, group)
        missing = missing_files(directory, group)
        try:
            self._trainer.load(group.adapter_name, directory, optimizer=True)
        except NoOptimizerStateError:
            missing.append("moments of the optimizer")
            self._trainer.load(group.adapter_name, directory, optimizer=False)
        state, window = load_state(directory, group, self._ranks, process_state=self._process_state)
        if _WINDOW_GRADIENT in window:
            self._put_gradient(group.adapter_name, window[_WINDOW_GRADIENT].numpy())
        return summary(state), missing

    def _put_gradient_by_snapshot(self, adapter_id: str, gradient: FloatArray) -> None:
        self._trainer.restore(adapter_id, replace(self._trainer.snapshot(adapter_id), gradient=gradient))
