"""The state of a run that trains all parameters: its weights, gradient, optimizer state and counts; and its steps.

Every step of an optimizer is torch's own code, with all settings passed at each step, as for adapters
(:mod:`twinkle.model.adapters.optimizer`); here each weight of the model is a parameter of the optimizer. The two rows
of state have the same meaning as there.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from twinkle.errors import NonFiniteError, UnsupportedError
from twinkle.model.adapters.adapter import ADAM
from twinkle.model.adapters.optimizer import check_steps, state_names, step_tensors
from twinkle.model.full.checkpoint import FullCopy, Loaded, ModelFiles
from twinkle.model.full.weights import TrainedWeights
from twinkle.model.library.parameter_groups import is_decayed
from twinkle.model.types import AdamParams, AdapterSnapshot, FloatArray, FullSpec

NO_GRADIENT: Mapping[str, float] = {"unclipped_grad_l2:mean": 0.0, "no_gradient:max": 1.0}


class _Tensors(NamedTuple):
    """What an optimizer changes in one step, for some of the parameters."""

    weights: list[Tensor]
    gradient: list[Tensor]
    rows: tuple[list[Tensor], list[Tensor]]  # of its state


@dataclass
class FullRun:
    """One run. Lists have a tensor for each parameter that this rank holds, or holds a part of.

    ``exp_avg`` and ``exp_avg_sq`` hold the state of the ``optimizer``, ``scalars`` those of its numbers that are the
    same for all weights.
    """

    adapter_id: str
    weights: TrainedWeights
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    step: int = 0
    optimizer: str = ADAM
    scalars: Mapping[str, float] = field(default_factory=dict)
    gradient: list[Tensor] | None = None
    divided: bool = False  # ranks hold parts of the gradient that have not been added up yet
    passes: int = 0

    @classmethod
    def fresh(cls, adapter_id: str, weights: TrainedWeights) -> "FullRun":
        exp_avg, exp_avg_sq = ([torch.zeros_like(each) for each in weights.masters] for _ in range(2))
        return cls(adapter_id, weights, exp_avg, exp_avg_sq)

    @property
    def nbytes(self) -> int:
        """Return the bytes of optimizer state and gradient."""
        gradient = self.gradient or ()  # read once: another thread may ask while a step drops it
        return sum(tensor.nbytes for tensors in (self.exp_avg, self.exp_avg_sq, gradient) for tensor in tensors)

    # --- gradient -----------------------------------------------------------------------------------------------------

    def add_gradient(self, gradient: list[Tensor]) -> None:
        """Add the gradient of a request. Each rank adds what it has computed of it."""
        if self.weights.adds_up and not self.divided:
            if self.gradient is not None:
                self.gradient = self.weights.counted_once(self.gradient)
            self.divided = True
        if self.gradient is None:
            self.gradient = gradient
        else:
            torch._foreach_add_(self.gradient, gradient)
        self.passes += 1

    def unite_gradient(self) -> None:
        """Add up the parts of all ranks, if that was not done yet."""
        if self.divided:
            assert self.gradient is not None
            self.weights.add_up(self.gradient)
            self.divided = False

    def drop_gradient(self) -> None:
        self.gradient, self.divided = None, False

    def gradient_norm(self, norm_type: float = 2.0) -> float:
        """Return the norm of the whole gradient; 0 without one. All ranks must call this."""
        return 0.0 if self.gradient is None else self.weights.norm(self.gradient, norm_type)

    def _finite_norm(self) -> float:
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            raise NonFiniteError(f"the accumulated gradient of run {self.adapter_id!r} has norm {norm}: no step taken")
        return norm

    # --- optimizers ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adam_step(self, params: AdamParams, *, decoupled: bool, decay_norms: bool) -> dict[str, float]:
        """Take one step of AdamW, or of Adam if the weight decay is not ``decoupled``, then drop the gradient.

        Without ``decay_norms`` norms and biases get no weight decay.
        """
        if self.gradient is None:
            return dict(NO_GRADIENT)
        norm = self._finite_norm()
        self.begin_state(ADAM)
        if params.grad_clip_norm > 0:
            # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6
            torch._foreach_mul_(self.gradient, min(1.0, params.grad_clip_norm / (norm + 1e-6)))
        for numbers, decayed in self._decay_groups(decay_norms):
            tensors = self._tensors(self.gradient, numbers)
            steps = torch.full((len(numbers),), float(self.step), device=tensors.weights[0].device)
            adam(
                tensors.weights,
                tensors.gradient,
                *tensors.rows,
                [],
                list(steps.unbind()),
                fused=True,
                amsgrad=False,
                decoupled_weight_decay=decoupled,
                beta1=params.beta1,
                beta2=params.beta2,
                lr=params.learning_rate,
                weight_decay=params.weight_decay if decayed else 0.0,
                eps=params.eps,
                maximize=False,
            )
        self._stepped()
        return {"unclipped_grad_l2:mean": norm}

    @torch.no_grad()
    def optimizer_step(self, name: str, settings: Mapping[str, Any], *, decay_norms: bool) -> dict[str, float]:
        """Take one step of ``torch.optim``'s optimizer ``name``, then drop the gradient.

        Without ``decay_norms`` norms and biases get no weight decay.
        """
        if self.gradient is None:
            return dict(NO_GRADIENT)
        if state_names(name, settings).matrices:
            self._require_matrices(name)
        norm = self._finite_norm()
        is_first = self.step == 0 or self.optimizer != name
        check_steps(name, settings, 0 if is_first else self.step, self.scalars)  # a schedule may have changed them
        self.begin_state(name)
        scalars = self.scalars  # of the optimizer before the step; those after it are the same for all groups
        for numbers, decayed in self._decay_groups(decay_norms):
            own = settings if decayed else {**settings, "weight_decay": 0.0}
            self.scalars = step_tensors(name, own, *self._tensors(self.gradient, numbers), self.step, scalars)
        self._stepped()
        return {"unclipped_grad_l2:mean": norm}

    def _decay_groups(self, decay_norms: bool) -> list[tuple[list[int], bool]]:
        """Return parameters by number in groups: with weight decay (True) and without. Empty groups are left out.

        Parameters that are not used have a gradient of zero, so without weight decay they keep their values.
        """
        names, unused = self.weights.names, self.weights.layout.unused
        decayed = [
            number for number, name in enumerate(names) if name not in unused and (decay_norms or is_decayed(name))
        ]
        others = sorted(set(range(len(names))) - set(decayed))
        return [(numbers, decays) for numbers, decays in ((decayed, True), (others, False)) if numbers]

    def _tensors(self, gradient: Sequence[Tensor], numbers: Sequence[int]) -> "_Tensors":
        weights, exp_avg, exp_avg_sq = self.weights.masters, self.exp_avg, self.exp_avg_sq
        return _Tensors(
            [weights[number].detach() for number in numbers],
            [gradient[number] for number in numbers],
            ([exp_avg[number] for number in numbers], [exp_avg_sq[number] for number in numbers]),
        )

    def begin_state(self, optimizer: str) -> None:
        """Let the state belong to this optimizer; if it belongs to another one, it starts from zero."""
        if self.optimizer != optimizer:
            self.optimizer, self.scalars, self.step = optimizer, {}, 0
            torch._foreach_zero_([*self.exp_avg, *self.exp_avg_sq])

    # --- state --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> AdapterSnapshot:
        """Return all state. All ranks must call this; the arrays are empty on all but the first."""
        weights = self.weights
        return AdapterSnapshot(
            spec=FullSpec(),
            step=self.step,
            layout=weights.layout.digest,
            weights=weights.row(weights.masters),
            exp_avg=weights.row(self.exp_avg),
            exp_avg_sq=weights.row(self.exp_avg_sq),
            gradient=None if self.gradient is None else weights.row(self.gradient),
            optimizer=self.optimizer,
            scalars=dict(self.scalars),
            passes=self.passes,
        )

    def restore(self, snapshot: AdapterSnapshot) -> None:
        """Take the state of a snapshot whose layout and shapes are those of the weights."""
        weights = self.weights
        split = functools.partial(weights.layout.split, names=weights.names)
        self.drop_gradient()
        weights.put(split(snapshot.weights))
        self._put_state(split(snapshot.exp_avg), split(snapshot.exp_avg_sq))
        if snapshot.gradient is not None:
            self.put_gradient(snapshot.gradient)
        self.step, self.passes = snapshot.step, snapshot.passes
        self.optimizer, self.scalars = snapshot.optimizer, dict(snapshot.scalars)

    def put_gradient(self, gradient: FloatArray) -> None:
        """Take this rank's part of a whole gradient, in the place of the one that there is."""
        weights = self.weights
        tensors = weights.layout.split(gradient, names=weights.names)
        own = (weights.part(index, tensor) for index, tensor in enumerate(tensors))
        self.gradient = [each.to(weights.masters[0].device, copy=True) for each in own]

    def copied(self, files: ModelFiles, dtype: torch.dtype, *, optimizer: bool) -> FullCopy:
        """Return a copy in host memory, as it is written to disk, without the gradient.

        With the ``optimizer``'s state the weights are fp32, else of ``dtype``. All ranks must call this; the copy has
        no tensors on all but the first.
        """
        streamed, on_host = self.streamed(files, dtype, optimizer=optimizer), self.weights.on_host
        moments = (self.exp_avg, self.exp_avg_sq) if optimizer else ()
        return dataclasses.replace(
            streamed,
            weights=on_host(self.weights.masters, streamed.dtype),
            moments=tuple(on_host(tensors, torch.float32) for tensors in moments),
        )

    def streamed(self, files: ModelFiles, dtype: torch.dtype, *, optimizer: bool) -> FullCopy:
        """Return what :meth:`copied` returns, with generators that gather one tensor at a time.

        All ranks must iterate over the weights, then over each row of the optimizer's state, to the end.
        """
        weights = self.weights
        moments = (self.exp_avg, self.exp_avg_sq) if optimizer else ()
        return FullCopy(
            weights.layout,
            files,
            torch.float32 if optimizer else dtype,
            weights.gathered(weights.masters),
            tuple(weights.gathered(tensors) for tensors in moments),
            step=self.step,
            passes=self.passes,
            optimizer=self.optimizer,
            scalars=dict(self.scalars),
        )

    def load(self, loaded: Loaded) -> None:
        """Take weights and state of a checkpoint that was checked; without optimizer state, that starts from zero."""
        names = self.weights.names
        self.weights.put(loaded.weights.read(names))
        if loaded.moments:
            exp_avg, exp_avg_sq = (each.read(names) for each in loaded.moments)
            self._put_state(exp_avg, exp_avg_sq)
        else:
            torch._foreach_zero_([*self.exp_avg, *self.exp_avg_sq])
        self.step, self.passes = loaded.state.step, loaded.state.passes
        self.optimizer, self.scalars = loaded.state.optimizer, dict(loaded.state.scalars)
        self.drop_gradient()

    def _put_state(self, exp_avg: Iterable[Tensor], exp_avg_sq: Iterable[Tensor]) -> None:
        """Replace the optimizer's state by whole tensors."""
        for own, tensors in ((self.exp_avg, exp_avg), (self.exp_avg_sq, exp_avg_sq)):
            for index, tensor in enumerate(tensors):
                own[index].copy_(self.weights.part(index, tensor))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _stepped(self) -> None:
        self.step += 1
        self.drop_gradient()
        self.weights.refresh()

    def _require_matrices(self, name: str) -> None:
        layout = self.weights.layout
        if not self.weights.held_whole:
            raise UnsupportedError(f"optimizer: {name} needs whole matrices, and this model is divided over processes")
        others = [each for each, shape in zip(layout.names, layout.shapes, strict=True) if len(shape) != 2]
        if others:
            raise UnsupportedError(
                f"optimizer: {name} trains matrices only, and a run that trains all parameters has {len(others)} that "
                f"are none, such as {others[0]}; use AdamW"
            )
