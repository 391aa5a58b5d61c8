"""Saves and resumes a plain model, or one of its adapters, together with the state of the verbs.

Checkpoints hold whole tensors, written by rank 0, so training can be resumed with any number of processes.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twinkle.errors import CheckpointError
from twinkle.model.adapters.checkpoint import STATE, write_whole
from twinkle.model.library.optimizer_group import OptimizerGroup
from twinkle.model.library.training_state import (
    check_resumable,
    copy_tokenizer,
    load_state,
    missing_files,
    progress,
    read_progress,
    say_missing,
    state_values,
    summary,
)
from twinkle.model.parallel import Parallelism, first_does, together
from twinkle.model.trainer.sharding import like, whole
from twinkle.model.transformers import gradients
from twinkle.model.transformers.peft_adapters import PeftAdapters

Parameters = Mapping[str, nn.Parameter]  # the parameters that a group trains, by name


class PlainState:
    """Saves and resumes groups of one model.

    ``base_name``: the name of the base model in saved adapters. ``tokenizer_id``: the tokenizer to copy into
    checkpoints; None: none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapters: PeftAdapters,
        parallel: Parallelism,
        base_name: str,
        tokenizer_id: str | None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._parallel = parallel
        self._base_name = base_name
        self._tokenizer_id = tokenizer_id

    def save(
        self,
        group: OptimizerGroup,
        parameters: Parameters,
        directory: Path,
        *,
        save_optimizer: bool,
        consumed_train_samples: int,
    ) -> None:
        ranks = self._parallel.ranks
        weights = self._gathered() if self._parallel.sharded and not group.adapter_name else None
        values = state_values(group, self._window(group, parameters)) if save_optimizer else {}
        state = progress(group, consumed_train_samples, self._parallel.data) if save_optimizer else None

        def write(staging: Path) -> None:
            if group.adapter_name:
                self._adapters.save(group.adapter_name, staging, self._base_name)
            else:
                self._model.save_pretrained(staging, state_dict=weights)
            if self._tokenizer_id is not None:
                copy_tokenizer(self._tokenizer_id, staging)
            for name, value in values.items():
                torch.save(value, staging / name)
            if state is not None:
                (staging / STATE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")

        first_does(ranks, lambda: write_whole(directory, write, overwrite=True))

    def resume(
        self, group: OptimizerGroup, parameters: Parameters, directory: Path, *, resume_only_model: bool
    ) -> dict[str, int]:
        """Restore a group from a checkpoint: its weights and, unless ``resume_only_model``, the rest of its state."""
        return together(self._parallel.ranks, lambda: self._resume(group, parameters, directory, resume_only_model))

    def _resume(
        self, group: OptimizerGroup, parameters: Parameters, directory: Path, resume_only_model: bool
    ) -> dict[str, int]:
        state = read_progress(directory, missing_ok=True) if resume_only_model else check_resumable(directory, group)
        if group.adapter_name:
            self._adapters.load(group.adapter_name, directory)
        else:
            load_full_weights(self._model, directory)
        if group.optimizer is not None:
            group.optimizer.state.clear()  # the moments belong to the old weights
        for parameter in parameters.values():
            parameter.grad = None
        group.drop_window()
        if resume_only_model:
            return summary(state)
        say_missing(directory, missing_files(directory, group))
        state, window = load_state(directory, group, self._parallel.data)
        for name, gradient in window.items():
            parameters[name].grad = like(gradient, parameters[name])
        gradients.leave_to_first(list(parameters.values()), self._parallel)
        return summary(state)

    def _gathered(self) -> dict[str, Tensor]:
        """Gather the whole weights. Return them on rank 0, which writes them, and nothing on other ranks."""
        weights: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            full = whole(tensor)
            if self._parallel.ranks.number == 0:
                weights[name] = full.cpu()
        return weights

    def _window(self, group: OptimizerGroup, parameters: Parameters) -> dict[str, Tensor]:
        """Return the whole gradients of a window that is not complete, by name. All ranks must call this."""
        divided = self._parallel.ranks.size > 1 and not group.normalized
        if divided:
            gradients.unite(list(parameters.values()), self._parallel)
        named = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        window = {name: whole(gradient).cpu() for name, gradient in named.items()}
        if divided:
            gradients.leave_to_first(list(parameters.values()), self._parallel)
        return window


@torch.no_grad()
def load_full_weights(model: PreTrainedModel, directory: Path) -> None:
    """Copy all weights of a checkpoint into a model, whole or sharded.

    If they do not fit, raise CheckpointError before any is copied.
    """
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no weights (model*.safetensors); construct the model from them")
    own: dict[str, Tensor] = model.state_dict()
    with ExitStack() as opened:
        try:
            readers = [opened.enter_context(safe_open(file, "pt")) for file in files]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"could not read the weights in {directory}: {error}") from error
        found = {name: reader for reader in readers for name in reader.keys()}  # noqa: SIM118  # not a dict
        places = {_place(own[name]) for name in found if name in own}  # tied weights are saved once
        wrong = [name for name in found if name not in own]
        wrong += [name for name, tensor in own.items() if name not in found and _place(tensor) not in places]
        shapes = {name: tuple(reader.get_slice(name).get_shape()) for name, reader in found.items()}
        wrong += [name for name, shape in shapes.items() if name in own and shape != tuple(own[name].shape)]
        if wrong:
            raise CheckpointError(
                f"the weights in {directory} do not fit the model; different: {', '.join(wrong[:3])}. Construct the "
                "model from them: model_id=<directory>"
            )
        for name, reader in found.items():
            own[name].copy_(like(reader.get_tensor(name), own[name]))


def _place(tensor: Tensor) -> int:
    """Return where a tensor, or this rank's shard of it, is in memory; tied weights have one place."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
