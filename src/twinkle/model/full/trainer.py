"""The trainer of all parameters of a model: one run at a time, with the methods of the multi-tenant trainer.

What that one calls an adapter is here a run, which has the whole model. It begins with the weights of the base model;
when it is removed, these are put back. Master weights, moments and gradients are fp32, also where the model computes in
bf16. A request is computed by itself, so that one that is invalid or produces NaN fails alone and changes nothing.

A trainer is used from one thread; methods that may be called from other threads say so. With a device mesh there is a
trainer in each of its processes (ranks). All must be given the same calls in the same order; each rank has some
sequences of a call's requests or none. What is returned as numpy arrays, and checkpoints, are those of the first rank.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twinkle import hub
from twinkle.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    CapacityError,
    InvalidInputError,
    TwinkleError,
    UnknownNameError,
    UnsupportedError,
)
from twinkle.hub.model_id import id_text
from twinkle.hub.resolution import loadable_name
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.adapters.optimizer import OPTIMIZERS
from twinkle.model.decoder.layers import GiveWay
from twinkle.model.decoder.loading import load_model
from twinkle.model.decoder.precision import read_dtype
from twinkle.model.full.assembly import TrainedModel, assemble
from twinkle.model.full.checkpoint import read_full, save_full
from twinkle.model.full.requests import Outcome, RequestRunner, Steps, finished
from twinkle.model.full.run import FullRun
from twinkle.model.parallel import Ranks, check_mesh, own_device, together
from twinkle.model.trainer.call import StepLimit
from twinkle.model.trainer.memory import device_memory
from twinkle.model.types import (
    EMPTY,
    AdamParams,
    AdapterSnapshot,
    FloatArray,
    FullSpec,
    TrainerNumbers,
    TrainingSpec,
    TrainItem,
    VisionSpec,
    check_adam_params,
)


class FullTrainer:
    """One run at a time on one model, all of whose parameters it trains. Build it with :meth:`from_pretrained`."""

    vision: VisionSpec | None = None  # it trains on text only: the features of images would change with the weights

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        model_id: str | PathLike[str],
        dtype: torch.dtype | None = None,
        base_name: str | None = None,
        tokenizer_id: str | PathLike[str] | None = None,
        memory_budget_bytes: int | None = None,
        max_tokens_per_batch: int | None = None,
        compiled: bool = False,
        device_mesh: DeviceMesh | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        """Take over a loaded model, which ``adopt_model`` has prepared: its layers are replaced and trained.

        dtype: what the model computes with, fp32 or bf16; None: that of its weights.
        base_name: the name of the base model in checkpoints; None: ``model_id``.
        tokenizer_id: the model whose tokenizer is copied into checkpoints; None: there is none.
        memory_budget_bytes: device memory for weights, state and activations together; None: what is free, on a CPU
        half of that. CapacityError, with the bytes that are needed, if that is too little.
        max_tokens_per_batch: most tokens of a batch that keeps its activations (longer sequences are recomputed);
        None: 16384 on CUDA, 4096 on CPU, less where memory is short.
        compiled: compile the decoder layers now; this takes a minute or so, and makes training steps on CUDA faster.
        device_mesh: the processes that train together; each constructs its own trainer with the same weights. Along the
        mesh's dimension fsdp the model, its gradient and the optimizer's state are cut into shards.
        reshard_after_forward: free the gathered layers of a sharded model after the forward pass, and gather them again
        for the backward pass, instead of holding them in between.
        """
        assembled = assemble(
            model,
            dtype=dtype or model.dtype,
            base_name=base_name or id_text(model_id),
            tokenizer_id=tokenizer_id,
            memory_budget_bytes=memory_budget_bytes,
            max_tokens_per_batch=max_tokens_per_batch,
            compiled=compiled,
            device_mesh=device_mesh,
            reshard_after_forward=reshard_after_forward,
        )
        self._take_over(assembled, id_text(model_id))

    @classmethod
    def from_assembled(cls, model: TrainedModel, *, model_id: str | PathLike[str]) -> Self:
        """Make a trainer of a model that is assembled already, such as one that Megatron runs."""
        trainer = cls.__new__(cls)  # the constructor takes a model of Transformers, and assembles it
        trainer._take_over(model, id_text(model_id))
        return trainer

    def _take_over(self, model: TrainedModel, model_id: str) -> None:
        self.model_id = model_id
        self.base_name = model.files.base_model
        self._model = model
        self.architecture = self._model.architecture
        self.device, self.dtype = self._model.device, self._model.dtype
        self.end_tokens, self.memory = self._model.end_tokens, self._model.memory
        self._weights, self._parallel = self._model.weights, self._model.parallel
        self._requests = RequestRunner(self._model)
        self._run: FullRun | None = None

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        base_name: str | None = None,
        memory_budget_bytes: int | None = None,
        max_tokens_per_batch: int | None = None,
        compiled: bool = False,
        device_mesh: DeviceMesh | None = None,
        reshard_after_forward: bool = True,
    ) -> Self:
        """Load a model by its id (see :mod:`twinkle.hub`).

        device: None takes CUDA where there is one. dtype: what the model computes with, "bf16" or "fp32"; None takes
        bf16 on accelerators and on CPUs with bf16 instructions, else fp32. Master weights are fp32 with the precision
        of the model's files. base_name: the name of the base model in checkpoints; None: the one by which Transformers
        finds the model (``org/name`` or a folder). The other arguments are those of the constructor.
        """
        if device_mesh is not None:
            check_mesh(device_mesh)  # before weights are read
        chosen = own_device(device, device_mesh)
        if chosen.type not in ("cpu", "cuda"):
            raise InvalidInputError("device", str(chosen), "cpu or cuda")
        sharded = device_mesh is not None and device_mesh.fsdp_world_size > 1
        place = torch.device("cpu") if sharded else chosen  # whole in host memory, shards on the device
        local, computed = hub.resolve(model_id), read_dtype(dtype, chosen)
        # Random weights are drawn in the compute dtype, so that they are those of a sampler on the same model id.
        model = load_model(local, torch.float32 if local.random_seed is None else computed, place)
        return cls(
            model,
            model_id=model_id,
            dtype=computed,
            base_name=base_name or loadable_name(model_id),
            tokenizer_id=model_id,
            memory_budget_bytes=memory_budget_bytes,
            max_tokens_per_batch=max_tokens_per_batch,
            compiled=compiled,
            device_mesh=device_mesh,
            reshard_after_forward=reshard_after_forward,
        )

    @property
    def ranks(self) -> Ranks:
        """Return the group of processes that train together; all must be given the same calls."""
        return self._parallel.ranks

    @property
    def data_ranks(self) -> Ranks:
        """Return one rank of each group of processes that have the same sequences; a sum over them counts each once."""
        return self._parallel.data

    # --- runs ---------------------------------------------------------------------------------------------------------

    def memory_report(self) -> str:
        """Describe how memory is divided."""
        return str(self.memory)

    def check_adapter(self, spec: TrainingSpec) -> None:
        """Raise for a spec that is not FullSpec. May be called from any thread."""
        if not isinstance(spec, FullSpec):
            raise UnsupportedError(
                f"spec: got {type(spec).__name__}, allowed: FullSpec, because this model trains all its parameters"
            )

    def create_adapter(self, adapter_id: str, spec: TrainingSpec) -> FullSpec:
        """Begin a run with the weights of the base model. CapacityError while another run holds the model."""
        self.check_adapter(spec)
        self._require_free(adapter_id)
        self._run = FullRun.fresh(adapter_id, self._weights)
        return FullSpec()

    def remove_adapter(self, adapter_id: str) -> None:
        """End the run: put the base model's weights back, and free optimizer state and gradient."""
        self._get(adapter_id)
        self._run = None
        self._model.gradient.drop()
        self._weights.reset()

    def adapter_ids(self) -> list[str]:
        run = self._run
        return [] if run is None else [run.adapter_id]

    def resident_adapter_ids(self) -> list[str]:
        """Return the id of the run, if there is one: a run is always on the device. May be called from any thread."""
        return self.adapter_ids()

    def host_bytes(self) -> int:
        """Return the bytes of host memory that the run takes now; 0 on a GPU. May be called from any thread.

        The base model's weights, which are in host memory, belong to the trainer and not to the run.
        """
        run = self._run
        return run.nbytes if run is not None and self.device.type == "cpu" else 0

    def host_bytes_of(self, spec: TrainingSpec) -> int:
        """Return the most bytes of host memory that a run takes. May be called from any thread."""
        self.check_adapter(spec)
        return self.memory.state.moments + self.memory.state.gradient if self.device.type == "cpu" else 0

    def numbers(self) -> TrainerNumbers:
        rows = self._model.passes.token_rows, self._model.passes.padding_rows
        return TrainerNumbers(len(self.adapter_ids()), 0, *rows, device_memory(self.device))

    def vocabulary_size(self) -> int:
        """Return how many token ids the model has."""
        return self.architecture.vocab_size

    def spec(self, adapter_id: str) -> FullSpec:
        self._get(adapter_id)
        return FullSpec()

    def step_count(self, adapter_id: str) -> int:
        """Return how many optimizer steps the run has taken."""
        return self._get(adapter_id).step

    def peft_config(self, adapter_id: str) -> dict[str, object]:
        """Raise UnsupportedError: there is no adapter that PEFT could load."""
        self._get(adapter_id)
        raise UnsupportedError("peft_config: a run that trains all parameters has no LoRA adapter")

    # --- training -----------------------------------------------------------------------------------------------------

    def forward(self, items: Sequence[TrainItem]) -> list[Outcome]:
        """Compute log-probabilities and losses, without gradients. One result or failure per item, in order."""
        return finished(self._steps(items, None, None, train=False))

    def forward_backward(self, items: Sequence[TrainItem]) -> list[Outcome]:
        """Compute log-probabilities and losses, and add each request's gradient to that of the run."""
        return finished(self._steps(items, None, None, train=True))

    def in_steps(
        self,
        items: Sequence[TrainItem],
        *,
        train: bool,
        limit: StepLimit | None,
        give_way: GiveWay | None = None,
    ) -> Steps:
        """Run :meth:`forward` or :meth:`forward_backward` by micro-batches, each of at most ``limit()`` tokens.

        The generator yields between micro-batches. With several ranks it runs everything without yielding. On a CPU
        ``give_way`` is called between layers. Meanwhile a sampler with weights of its own may run, and this run's
        weights may be read, but they must not change.
        """
        if self._parallel.ranks.size > 1:
            limit = give_way = None
        return self._steps(items, limit, give_way if self.device.type == "cpu" else None, train=train)

    def _steps(
        self, items: Sequence[TrainItem], limit: StepLimit | None, give_way: GiveWay | None, *, train: bool
    ) -> Steps:
        refusal = functools.partial(self._refusal, train=train)
        if not train:
            return self._requests.scored(items, refusal, limit, give_way)
        return self._requests.trained(items, refusal, limit, give_way, self._keep_gradient)

    def _keep_gradient(self, item: TrainItem) -> None:
        """Add the gradient of a request that succeeded to that of its run."""
        self._get(item.adapter_id).add_gradient(self._model.gradient.take())

    def optim_step(
        self, adapter_id: str, params: AdamParams, *, decoupled: bool = True, decay_norms: bool = True
    ) -> dict[str, float]:
        """Take one AdamW step with the accumulated gradient, then drop the gradient.

        Without a gradient nothing changes, and the metrics contain ``no_gradient:max``. ``decoupled=False`` is Adam,
        whose weight decay is part of the gradient. ``decay_norms=False``: norms and biases get no weight decay, as in
        the library's models; Tinker's ``weight_decay`` is for all weights.
        """
        run = self._get(adapter_id)
        check_adam_params(params)
        run.unite_gradient()
        return run.adam_step(params, decoupled=decoupled, decay_norms=decay_norms)

    def optimizer_step(
        self, adapter_id: str, name: str, settings: Mapping[str, Any], *, decay_norms: bool = True
    ) -> dict[str, float]:
        """Take one step of another optimizer of ``torch.optim`` with the accumulated gradient, then drop the gradient.

        ``settings``: all keywords of its constructor. ``decay_norms``: see :meth:`optim_step`. A run has the state of
        one optimizer at a time.
        """
        run = self._get(adapter_id)
        if name not in OPTIMIZERS:
            raise UnknownNameError("optimizer", name, OPTIMIZERS)
        run.unite_gradient()
        return run.optimizer_step(name, settings, decay_norms=decay_norms)

    def scale_gradient(self, adapter_id: str, factor: float) -> None:
        """Multiply the accumulated gradient by ``factor``; without a gradient nothing changes."""
        run = self._get(adapter_id)
        if run.gradient is not None:
            torch._foreach_mul_(run.gradient, factor)

    def gradient_norm(self, adapter_id: str, norm_type: float = 2.0) -> float:
        """Return the norm of the accumulated gradient; 0 without one."""
        return self._with_gradient(adapter_id).gradient_norm(norm_type)

    def zero_grad(self, adapter_id: str) -> None:
        """Drop the accumulated gradient."""
        self._get(adapter_id).drop_gradient()

    def gradients(self, adapter_id: str) -> dict[str, FloatArray]:
        """Return the accumulated gradient by the model's parameter names; empty between windows.

        All ranks must call this; it is empty on all but the first.
        """
        gradient = self._with_gradient(adapter_id).gradient
        return {} if gradient is None else self._weights.arrays(gradient)

    def weights(self, adapter_id: str) -> dict[str, FloatArray]:
        """Return the master weights by the model's parameter names; tied weights occur once.

        All ranks must call this; it is empty on all but the first.
        """
        self._get(adapter_id)
        return self._weights.arrays(self._weights.masters)

    def shapes(self, adapter_id: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters by name, without a copy of them; the same on all ranks."""
        self._get(adapter_id)
        layout = self._weights.layout
        return dict(zip(layout.names, layout.shapes, strict=True))

    def compute_weights(self) -> Mapping[str, Tensor]:
        """Return the weights that the model computes with now, by name, on the device. Tied weights occur once.

        They are the live tensors, which the next step changes: copy them before that.
        """
        if not self._weights.held_whole:
            raise UnsupportedError("compute_weights: the model is divided over processes; use gather_compute_weights()")
        return self._weights.layout.named([parameter.detach() for parameter in self._weights.parameters])

    def gather_compute_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what :meth:`compute_weights` returns one by one, each gathered if the model is divided over processes.

        All ranks must iterate to the end.
        """
        if self._weights.held_whole:
            yield from self.compute_weights().items()
            return
        weights = self._weights
        yield from zip(weights.layout.names, weights.compute_wholes(self.dtype), strict=True)

    # --- state --------------------------------------------------------------------------------------------------------

    def snapshot(self, adapter_id: str) -> AdapterSnapshot:
        """Return all state needed to continue exactly, including the gradient of an open window.

        All ranks must call this; the arrays are empty on all but the first.
        """
        return self._with_gradient(adapter_id).snapshot()

    def restore(self, adapter_id: str, snapshot: AdapterSnapshot) -> None:
        """Put a run into the state of a snapshot, beginning it if it does not exist."""
        self.check_adapter(snapshot.spec)
        layout = self._weights.layout
        if layout.digest != snapshot.layout:
            raise InvalidInputError("snapshot.layout", snapshot.layout, f"{layout.digest} (another base model?)")
        for name in ("weights", "exp_avg", "exp_avg_sq", "gradient"):
            array = vars(snapshot)[name]
            if array is not None and array.shape != (layout.size,):
                raise InvalidInputError(f"snapshot.{name}", f"shape {array.shape}", f"({layout.size},)")
        if adapter_id not in self.adapter_ids():
            self._require_free(adapter_id)
            self._run = FullRun.fresh(adapter_id, self._weights)
        self._get(adapter_id).restore(snapshot)

    def put_gradient(self, adapter_id: str, gradient: FloatArray) -> None:
        """Set the gradient of a window, which is whole and the same on all ranks."""
        size = self._weights.layout.size
        if gradient.shape != (size,):
            raise InvalidInputError("gradient", f"shape {gradient.shape}", f"({size},)")
        run = self._get(adapter_id)
        run.drop_gradient()
        run.put_gradient(gradient)

    def save(
        self,
        adapter_id: str,
        directory: str | Path,
        optimizer: bool = True,
        overwrite: bool = False,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a directory that Transformers can load; with ``optimizer`` also its state. The gradient is not written.

        state: further entries of trainer_state.json. companions: a function that writes further files into the
        directory it is given. The checkpoint appears with all its files or not at all. Where the model is divided over
        processes, the first rank gathers and writes one tensor at a time.
        """
        copy = self._get(adapter_id).streamed(self._model.files, self.dtype, optimizer=optimizer)

        def write() -> None:
            try:
                save_full(copy, Path(directory), overwrite=overwrite, state=state, companions=companions)
            finally:
                take_part()  # also after an error: other ranks wait until all tensors are gathered

        def take_part() -> None:
            for tensors in (copy.weights, *copy.moments):
                deque(tensors, maxlen=0)

        ranks = self._parallel.ranks
        together(ranks, write if ranks.number == 0 else take_part)

    def prepare_save(
        self,
        adapter_id: str,
        optimizer: bool = True,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
        synced: bool = True,
    ) -> Callable[[Path], None]:
        """Copy what :meth:`save` would write to host memory, and return a function that writes it to a directory.

        The function may be called from any thread. It overwrites an existing directory. All ranks must call this
        method; that function is for the first rank, others have nothing to write. ``synced``: as for adapters.
        """
        copy = self._get(adapter_id).copied(self._model.files, self.dtype, optimizer=optimizer)
        return functools.partial(save_full, copy, overwrite=True, state=state, companions=companions, synced=synced)

    def load(self, adapter_id: str, directory: str | Path, optimizer: bool = True) -> None:
        """Read a folder written by :meth:`save` or any other Hugging Face folder of the same model into the run.

        With ``optimizer`` the directory must hold the optimizer's state; without, that state starts from zero. An
        accumulated gradient is dropped. If the folder does not fit, nothing changes.
        """
        run = self._get(adapter_id)
        weights = self._weights
        read = functools.partial(read_full, Path(directory), weights.layout, optimizer=optimizer, names=weights.names)
        run.load(together(self._parallel.ranks, read))

    def set_aside(self, size: int) -> None:
        """Give up ``size`` bytes of unused memory for another use of the device."""
        if not 0 <= size <= self.memory.adapters:
            raise CapacityError(
                f"{size / 2**20:.0f} MiB are asked for; beside weights, state and activations of the trainer, "
                f"{self.memory.adapters / 2**20:.0f} MiB are free"
            )
        self.memory = dataclasses.replace(self.memory, adapters=self.memory.adapters - size)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _get(self, adapter_id: str) -> FullRun:
        if self._run is None or self._run.adapter_id != adapter_id:
            raise AdapterNotFoundError(adapter_id)
        return self._run

    def _with_gradient(self, adapter_id: str) -> FullRun:
        """Return the run with its whole gradient."""
        run = self._get(adapter_id)
        run.unite_gradient()
        return run

    def _require_free(self, adapter_id: str) -> None:
        if self._run is None:
            return
        if self._run.adapter_id == adapter_id:
            raise AdapterExistsError(adapter_id)
        raise CapacityError("this model trains all its parameters for one run at a time, and another run holds it")

    def _refusal(self, item: object, *, train: bool) -> TwinkleError | None:
        """Return why a request cannot be computed at all; None for one whose other fields are to be checked."""
        if not isinstance(item, TrainItem):
            return InvalidInputError("item", type(item), "a TrainItem")
        if not item.base_model:
            held = self._run is not None and self._run.adapter_id == item.adapter_id
            return None if held else AdapterNotFoundError(str(item.adapter_id))
        if train:
            return InvalidInputError("base_model", True, "False: the base model is not trained")
        if self._run is None:
            return None
        return UnsupportedError(
            "base_model (in requests: disable_lora): a run trains all parameters of this model, so that the base "
            "model's weights are not on the device; compute with the base model before the run begins, on another "
            "model, or with a sampler"
        )
