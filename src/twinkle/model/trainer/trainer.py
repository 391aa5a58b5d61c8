"""The multi-tenant trainer: one frozen base model, many adapters in every batch.

``forward_backward`` takes the requests of any number of tenants, packs their sequences into batches that fit the
memory, and computes them together; a request that is invalid or produces NaN fails alone and changes nothing.
``optim_step`` changes one adapter. Nothing here knows of HTTP, Ray or time. A trainer is used from one thread; methods
that may be called from other threads say so.

With a device mesh there is a trainer in each of its processes (ranks). All must be given the same calls in the same
order; each rank has some sequences of a call's requests or none. Adapters are the same on all ranks except for the
gradient of an open window: each rank holds the part that its own sequences contributed, and the parts are added up when
the whole gradient is first needed. Where the base model itself is cut (:mod:`twinkle.model.adapters.cuts`), so are the
adapters; what a trainer returns or writes is whole on every rank, so such methods must be called on all ranks.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twinkle import hub
from twinkle.errors import (
    AdapterExistsError,
    CapacityError,
    InvalidInputError,
    TwinkleError,
    UnknownNameError,
    UnsupportedError,
)
from twinkle.hub.model_id import id_text
from twinkle.hub.resolution import loadable_name
from twinkle.images import ImageProcessing
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.adapters import checkpoint
from twinkle.model.adapters.adapter import PAGED_BYTES_PER_PARAMETER, Adapter
from twinkle.model.adapters.optimizer import OPTIMIZERS, adam_step, cut_norm, optimizer_step
from twinkle.model.adapters.peft_config import peft_config, spec_from_peft
from twinkle.model.adapters.residency import AdapterPool
from twinkle.model.decoder.architecture import read_vision
from twinkle.model.decoder.joined import join_weights
from twinkle.model.decoder.loading import load_model
from twinkle.model.decoder.lora.stacks import RowLayout, Stack, initial_row
from twinkle.model.decoder.precision import read_dtype
from twinkle.model.decoder.targets import check_ranks, check_spec, select_targets, short_names, warn_of_no_effect
from twinkle.model.parallel import Ranks, check_mesh, first_does, own_device, together
from twinkle.model.trainer.call import TrainerCall
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.host_memory import host_memory_limit
from twinkle.model.trainer.memory import MemoryPlan, device_memory
from twinkle.model.trainer.packing import Budget
from twinkle.model.trainer.preparation import PreparedModel, prepare_model
from twinkle.model.types import (
    EMPTY,
    AdamParams,
    AdapterSnapshot,
    FloatArray,
    Image,
    LoraSpec,
    TrainerNumbers,
    TrainFailure,
    TrainingSpec,
    TrainItem,
    TrainResult,
    VisionSpec,
    check_adam_params,
)
from twinkle.utils.progress import Progress

_REPORTED_RANKS = (8, 32)


class Trainer:
    """Many LoRA adapters on one frozen model. Build it with :meth:`from_pretrained`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        model_id: str | PathLike[str],
        base_name: str | None = None,
        memory_budget_bytes: int | None = None,
        max_tokens_per_batch: int | None = None,
        compiled: bool = False,
        device_mesh: DeviceMesh | None = None,
        reshard_after_forward: bool = True,
        processing: ImageProcessing | None = None,
    ) -> None:
        """Take over a loaded model: it is frozen and its linear layers are replaced.

        base_name: the name of the base model in saved adapters; None: ``model_id``.
        memory_budget_bytes: device memory for weights, adapters and activations together; None: what is free, on
        a CPU half of that.
        max_tokens_per_batch: most tokens of a batch that keeps its activations (longer sequences are recomputed);
        None: 16384 on CUDA, 4096 on CPU, less where memory is short.
        compiled: compile the decoder layers now; this takes a minute or so, and makes training steps on CUDA faster.
        device_mesh: the processes that train together; each constructs its own trainer with the same weights. Along the
        mesh's dimension fsdp the base model is cut into shards.
        reshard_after_forward: free the gathered layers of a sharded base after the forward pass, and gather them again
        for the backward pass, instead of holding them in between.
        processing: makes patches of image files, for a vision model.
        """
        with Progress(f"preparing {model_id}") as progress:
            prepared = prepare_model(
                model,
                name=id_text(model_id),
                memory_budget_bytes=memory_budget_bytes,
                max_tokens_per_batch=max_tokens_per_batch,
                compiled=compiled,
                device_mesh=device_mesh,
                reshard_after_forward=reshard_after_forward,
                progress=progress,
                processing=processing,
            )
        self._take_over(prepared, id_text(model_id), base_name)

    @classmethod
    def from_prepared(
        cls, prepared: PreparedModel, *, model_id: str | PathLike[str], base_name: str | None = None
    ) -> Self:
        """Make a trainer of a base model that is prepared already, such as one that Megatron runs.

        The other arguments are those of the constructor.
        """
        trainer = cls.__new__(cls)  # the constructor takes a model of Transformers, and prepares it
        trainer._take_over(prepared, id_text(model_id), base_name)
        return trainer

    def _take_over(self, prepared: PreparedModel, model_id: str, base_name: str | None) -> None:
        self.model_id = model_id
        self.base_name = base_name or model_id
        self.device: torch.device = prepared.device
        self.dtype: torch.dtype = prepared.dtype
        self.architecture = prepared.architecture
        self.end_tokens = prepared.end_tokens
        self.memory: MemoryPlan = prepared.memory
        self._passes = prepared.passes
        self._pipeline = prepared.pipeline
        self._features = prepared.features
        self._remote = prepared.remote
        self._engine = prepared.engine
        self._parallel = prepared.parallel
        self._cuts = prepared.cuts
        plan = self.memory
        self._budget = Budget(plan.tokens, plan.tokens_recomputed, most_tokens=plan.most_tokens, logits=plan.logits)
        self._has_budget = prepared.has_budget
        self._pool = AdapterPool(self._pool_bytes(), self.dtype, self.device)

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

        device: None takes CUDA where there is one. dtype: "bf16" or "fp32"; None takes bf16 on accelerators and
        on CPUs with bf16 instructions, else fp32. base_name: the name of the base model in saved adapters; None: the
        one by which Transformers finds the model (``org/name`` or a folder). The other arguments are those of the
        constructor.
        """
        if device_mesh is not None:
            check_mesh(device_mesh)  # before weights are read
        chosen = own_device(device, device_mesh)
        if chosen.type not in ("cpu", "cuda"):
            raise InvalidInputError("device", str(chosen), "cpu or cuda")
        sharded = device_mesh is not None and device_mesh.fsdp_world_size > 1
        place = torch.device("cpu") if sharded else chosen  # whole in host memory, shards on the device
        local = hub.resolve(model_id)
        weights_dtype = read_dtype(dtype, chosen)
        model = load_model(local, weights_dtype, place, images=not sharded)
        if place.type == "cuda":  # before any pass is captured: it moves weights
            join_weights(model, spare_rows=weights_dtype == torch.bfloat16)  # samplers capture decoding in bf16 only
        return cls(
            model,
            model_id=model_id,
            base_name=base_name or loadable_name(model_id),
            memory_budget_bytes=memory_budget_bytes,
            max_tokens_per_batch=max_tokens_per_batch,
            compiled=compiled,
            device_mesh=device_mesh,
            reshard_after_forward=reshard_after_forward,
            processing=ImageProcessing.from_folder(local.path) if read_vision(model) is not None else None,
        )

    @property
    def ranks(self) -> Ranks:
        """Return the group of processes that train together; all must be given the same calls."""
        return self._parallel.ranks

    @property
    def data_ranks(self) -> Ranks:
        """Return one rank of each group of processes that have the same sequences; a sum over them counts each once."""
        return self._parallel.data

    # --- adapters -----------------------------------------------------------------------------------------------------

    def check_adapter(self, spec: TrainingSpec) -> None:
        """Raise for a spec that this model can never have. May be called from any thread.

        InvalidInputError, too, if such an adapter never fits the memory that is set aside for adapters.
        """
        checked = check_spec(spec)
        layout = self._cuts.own(self._layout(checked))
        try:
            self._pool.check_size("new", layout)
        except CapacityError as error:
            raise InvalidInputError("rank", checked.largest_rank, f"one with which it fits: {error}") from error

    def create_adapter(self, adapter_id: str, spec: TrainingSpec) -> LoraSpec:
        """Make a fresh adapter; returns its spec with the seed that was used."""
        if adapter_id in self._pool:
            raise AdapterExistsError(adapter_id)
        made = self._parallel.ranks.gather(check_spec(spec))[0]  # a seed that was drawn at random is rank 0's on all
        adapter = self._blank(adapter_id, made)
        assert made.seed is not None
        warn_of_no_effect(made, self.architecture)
        ranks = made.module_ranks([target.name for target in adapter.whole.targets])
        whole_P = initial_row(adapter.whole, ranks, made.seed, made.init_weights)
        adapter.weights_P.copy_(self._cuts.cut(whole_P, adapter.layout))
        self._pool.add(adapter)
        return made

    def create_adapter_from_peft(self, adapter_id: str, lora_config: Mapping[str, object]) -> LoraSpec:
        """Make a fresh adapter from PEFT's ``LoraConfig(...).to_dict()`` or the contents of an adapter_config.json."""
        return self.create_adapter(adapter_id, spec_from_peft(lora_config))

    def remove_adapter(self, adapter_id: str) -> None:
        self._pool.remove(adapter_id)

    def adapter_ids(self) -> list[str]:
        return self._pool.ids()

    def resident_adapter_ids(self) -> list[str]:
        """Return the ids of the adapters on the device, not in host memory. May be called from any thread."""
        return self._pool.resident_ids()

    def host_bytes(self) -> int:
        """Return the bytes of host memory that adapters take now. May be called from any thread.

        Where the device is the CPU, resident adapters count too.
        """
        return self._pool.host_bytes()

    def host_bytes_of(self, spec: TrainingSpec) -> int:
        """Return the most bytes of host memory that an adapter of this shape takes. May be called from any thread."""
        layout = self._cuts.own(self._layout(check_spec(spec)))
        copy = self.dtype.itemsize if self.device.type == "cpu" else 0
        return (PAGED_BYTES_PER_PARAMETER + copy) * layout.largest_size

    def memory_report(self) -> str:
        """Describe how memory is divided, and how many adapters fit the device."""
        if not self._has_budget:
            return f"{self.memory}; the host's memory limits adapters"
        counts = []
        mlp = not self.architecture.has_other_experts
        for rank in _REPORTED_RANKS:
            whole, for_passes = self._pool.capacity(self._cuts.own(self._layout(LoraSpec(rank, train_mlp=mlp))))
            counts.append(f"{whole} of rank {rank} with optimizer states, {for_passes} without")
        where = "" if mlp else " (on attention alone)"
        return f"{self.memory}; adapters that fit the device{where}: {'; '.join(counts)}; others are in host memory"

    def numbers(self) -> TrainerNumbers:
        resident = len(self._pool.resident_ids())
        rows = self._passes.token_rows, self._passes.padding_rows
        paged = len(self._pool.ids()) - resident
        return TrainerNumbers(resident, paged, *rows, device_memory(self.device), *self.image_counts())

    @property
    def vision(self) -> VisionSpec | None:
        """Return what the model wants of images; None: it is trained on text only."""
        return None if self._features is None else self.architecture.vision

    @property
    def image_processing(self) -> ImageProcessing | None:
        """Return the model's image processor; None: it has none, or the model is trained on text only."""
        return None if self._features is None else self._features.processing

    def wants_pixels(self, image: Image) -> bool:
        """Return whether the next pass with an image would have to decode its file. May be called in any thread."""
        return self._features is not None and not self._features.has(image)

    def image_counts(self) -> tuple[int, int]:
        """Return how many images the vision tower has seen, and how many were known. May be called in any thread."""
        return (0, 0) if self._features is None else (self._features.computed, self._features.reused)

    def vocabulary_size(self) -> int:
        """Return how many token ids the model has."""
        return self.architecture.vocab_size

    def spec(self, adapter_id: str) -> LoraSpec:
        return self._pool.get(adapter_id).spec

    def step_count(self, adapter_id: str) -> int:
        return self._pool.get(adapter_id).step

    def peft_config(self, adapter_id: str) -> dict[str, object]:
        """Return the contents of the adapter's adapter_config.json."""
        adapter = self._pool.get(adapter_id)
        targets = adapter.whole.targets
        names = [target.name for target in targets]
        return peft_config(adapter.spec, short_names(targets, self.architecture), self.base_name, names)

    # --- training -----------------------------------------------------------------------------------------------------

    def forward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        """Compute log-probabilities and losses, without gradients. One result or failure per item, in order."""
        return self._run(items, train=False)

    def forward_backward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        """Compute log-probabilities and losses, and add each request's gradient to that of its adapter."""
        return self._run(items, train=True)

    def in_steps(
        self,
        items: Sequence[TrainItem],
        *,
        train: bool,
        limit: Callable[[], int | None] | None,
        give_way: Callable[[], None] | None = None,
    ) -> Generator[None, None, list[TrainResult | TrainFailure]]:
        """Run :meth:`forward` or :meth:`forward_backward` by micro-batches, each of at most ``limit()`` tokens.

        The generator yields between micro-batches; until it is resumed, other calls may run on other adapters. With
        several ranks it runs everything without yielding. On a CPU one long sequence takes seconds, so ``give_way`` is
        called between layers there, and may make such calls. Results are the same to the last bit, whatever runs there.

        Without a ``limit`` nothing is yielded, micro-batches are those of :meth:`forward_backward`, and ``give_way``
        may only run a sampler on this trainer, because no memory is left for other calls.
        """
        if self._parallel.sharded or self._parallel.ranks.size > 1:
            return self._run(items, train=train)

        def let_others_compute() -> None:
            assert give_way is not None
            budget, self._budget = self._budget, self._budget.half()  # this call holds at most the other half
            try:
                with torch.enable_grad():  # this call may have disabled it
                    give_way()
            finally:
                self._budget = budget

        interrupted = give_way is not None and self.device.type == "cpu"
        call = TrainerCall(
            self._passes,
            self._pool,
            self._budget,
            train=train,
            parallel=self._parallel,
            give_way=let_others_compute if interrupted else None,
            leaves_half=limit is not None,
            features=self._features,
        )
        results = call.run(items) if limit is None else (yield from call.steps(items, limit))
        # Both may have been lowered: by this call, and by calls that ran in between.
        self._budget = min(self._budget, call.budget, key=lambda budget: budget.tokens)
        return results

    def optim_step(
        self, adapter_id: str, params: AdamParams, *, decoupled: bool = True, decay_norms: bool = True
    ) -> dict[str, float]:
        """Take one AdamW step with the accumulated gradient, then drop the gradient.

        Without a gradient nothing changes, and the metrics contain ``no_gradient:max``. ``decoupled=False`` is Adam,
        whose weight decay is part of the gradient. ``decay_norms`` has no effect: an adapter has no norms and biases.
        """
        adapter = self._pool.get(adapter_id)
        check_adam_params(params)
        in_parts = self._pool.make_ready_to_step(adapter, may_be_in_parts=True)
        self._unite_gradient(adapter)
        return adam_step(adapter, params, decoupled=decoupled, in_parts=in_parts, cuts=self._cuts)

    def optimizer_step(
        self, adapter_id: str, name: str, settings: Mapping[str, Any], *, decay_norms: bool = True
    ) -> dict[str, float]:
        """Take one step of another optimizer of ``torch.optim`` with the accumulated gradient, then drop the gradient.

        ``settings``: all keywords of its constructor. ``decay_norms`` has no effect, as in :meth:`optim_step`. An
        adapter has the state of one optimizer at a time.
        """
        adapter = self._pool.get(adapter_id)
        if name not in OPTIMIZERS:
            raise UnknownNameError("optimizer", name, OPTIMIZERS)
        self._pool.make_ready_to_step(adapter)
        self._unite_gradient(adapter)
        return optimizer_step(adapter, name, settings, cuts=self._cuts)

    def scale_gradient(self, adapter_id: str, factor: float) -> None:
        """Multiply the accumulated gradient by ``factor``; without a gradient nothing changes."""
        adapter = self._pool.get(adapter_id)
        if adapter.gradient_P is not None:
            adapter.gradient_P = adapter.gradient_P * factor

    def gradient_norm(self, adapter_id: str, norm_type: float = 2.0) -> float:
        """Return the norm of the accumulated gradient; 0 without one."""
        adapter = self._with_gradient(adapter_id)
        gradient_P = adapter.gradient_P
        return 0.0 if gradient_P is None else cut_norm(gradient_P, adapter.layout, self._cuts, norm_type)

    def zero_grad(self, adapter_id: str) -> None:
        """Drop the accumulated gradient."""
        self._pool.get(adapter_id).drop_gradient()

    def gradients(self, adapter_id: str) -> dict[str, FloatArray]:
        """Return the accumulated gradient by PEFT's parameter names; empty between windows."""
        adapter = self._with_gradient(adapter_id)
        return {} if adapter.gradient_P is None else self._arrays(adapter, adapter.gradient_P)

    def weights(self, adapter_id: str) -> dict[str, FloatArray]:
        """Return the master weights by PEFT's parameter names."""
        adapter = self._pool.get(adapter_id)
        return self._arrays(adapter, adapter.weights_P)

    def shapes(self, adapter_id: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by PEFT's parameter names."""
        adapter = self._pool.get(adapter_id)
        return checkpoint.named_shapes(adapter.spec, adapter.whole)

    def peft_adapter(self, adapter_id: str, dtype: torch.dtype) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return an adapter as :meth:`save` writes it: its adapter_config.json, and copies of its weights on the host.

        dtype: that of the copies. Weights are rounded on the device, which is faster than copying all their bits.
        """
        adapter = self._pool.get(adapter_id)
        row_P = self._cuts.gather(adapter.weights_P, adapter.layout).to(dtype)
        host_P = torch.empty(row_P.shape, dtype=dtype, pin_memory=row_P.is_cuda).copy_(row_P)
        return self.peft_config(adapter_id), checkpoint.named_tensors(host_P, adapter.spec, adapter.whole)

    # --- state --------------------------------------------------------------------------------------------------------

    def snapshot(self, adapter_id: str) -> AdapterSnapshot:
        """Return all state needed to continue exactly, including the gradient of an open window."""
        adapter = self._with_gradient(adapter_id)
        return AdapterSnapshot(
            spec=adapter.spec,
            step=adapter.step,
            layout=adapter.whole.digest,
            weights=self._array(adapter, adapter.weights_P),
            exp_avg=self._array(adapter, adapter.exp_avg_P),
            exp_avg_sq=self._array(adapter, adapter.exp_avg_sq_P),
            gradient=None if adapter.gradient_P is None else self._array(adapter, adapter.gradient_P),
            optimizer=adapter.optimizer,
            scalars=dict(adapter.scalars),
            passes=adapter.passes,
        )

    def restore(self, adapter_id: str, snapshot: AdapterSnapshot) -> None:
        """Put an adapter into the state of a snapshot, creating it if it does not exist."""
        fresh = self._blank(adapter_id, check_spec(snapshot.spec))
        whole = fresh.whole
        if not whole.fits(snapshot.layout):
            raise InvalidInputError("snapshot.layout", snapshot.layout, f"{whole.digest} (another base model?)")
        for name in ("weights", "exp_avg", "exp_avg_sq", "gradient"):
            array = vars(snapshot)[name]
            if array is not None and array.shape != (whole.size,):
                raise InvalidInputError(f"snapshot.{name}", f"shape {array.shape}", f"({whole.size},)")
        fresh.weights_P.copy_(self._own_part(fresh, snapshot.weights))
        fresh.exp_avg_P.copy_(self._own_part(fresh, snapshot.exp_avg))
        fresh.exp_avg_sq_P.copy_(self._own_part(fresh, snapshot.exp_avg_sq))
        if snapshot.gradient is not None:
            fresh.gradient_P = self._own_part(fresh, snapshot.gradient.copy())
        fresh.step, fresh.passes = snapshot.step, snapshot.passes
        fresh.optimizer, fresh.scalars = snapshot.optimizer, dict(snapshot.scalars)
        self._pool.put(fresh)

    def save(
        self,
        adapter_id: str,
        directory: str | Path,
        optimizer: bool = True,
        overwrite: bool = False,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a directory that PEFT can load; with ``optimizer`` also its state. The gradient is not written.

        state: further entries of trainer_state.json. companions: a function that writes further files into the
        directory it is given. The checkpoint appears with all its files or not at all.
        """
        adapter = self._gathered(self._pool.get(adapter_id), optimizer)
        write = functools.partial(
            checkpoint.save_adapter,
            adapter,
            Path(directory),
            target_modules=short_names(adapter.layout.targets, self.architecture),
            base_model=self.base_name,
            optimizer=optimizer,
            overwrite=overwrite,
            state=state,
            companions=companions,
        )
        first_does(self._parallel.ranks, write)

    def prepare_save(
        self,
        adapter_id: str,
        optimizer: bool = True,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
        synced: bool = True,
    ) -> Callable[[Path], None]:
        """Copy what :meth:`save` would write, and return a function that writes it to a directory.

        The function may be called from any thread. It overwrites an existing directory. With ``synced=False`` it does
        not wait until the files have reached the disk: they survive the death of this process, not a power failure.
        """
        adapter = self._gathered(self._pool.get(adapter_id), optimizer)
        return functools.partial(
            checkpoint.save_adapter,
            adapter.host_copy(optimizer),
            target_modules=short_names(adapter.layout.targets, self.architecture),
            base_model=self.base_name,
            optimizer=optimizer,
            overwrite=True,
            state=state,
            companions=companions,
            synced=synced,
        )

    def load(self, adapter_id: str, directory: str | Path, optimizer: bool = True) -> None:
        """Read a directory written by :meth:`save` or by PEFT into an adapter of the same shape.

        With ``optimizer`` the directory must hold the optimizer's state; without, that state starts from zero.
        """
        adapter = self._pool.get(adapter_id)
        read = functools.partial(checkpoint.load_adapter, directory=Path(directory), optimizer=optimizer)
        together(self._parallel.ranks, lambda: self._read_into(adapter, read))
        if adapter.slot is not None:
            adapter.refresh_compute_copy()

    def create_adapter_from_checkpoint(
        self, adapter_id: str, directory: str | Path, optimizer: bool = True
    ) -> LoraSpec:
        """Make an adapter with the shape and the weights of a directory written by :meth:`save` or by PEFT."""
        spec = self.create_adapter(adapter_id, checkpoint.read_spec(Path(directory)))
        try:
            self.load(adapter_id, directory, optimizer)
        except TwinkleError:
            self.remove_adapter(adapter_id)
            raise
        return spec

    # --- what a sampler on the same model needs -----------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        if self._engine is None or self._parallel.sharded:
            raise UnsupportedError(
                "model: a sampler cannot run on the shards or cuts of a multi-LoRA model; allowed: "
                "LocalSampler(model_id), which loads a base model of its own"
            )
        return self._engine

    @property
    def base(self) -> PreTrainedModel:
        """Return the base model, with its layers replaced, and its weights sharded if the trainer's are."""
        if self._engine is None:
            raise UnsupportedError(f"model: the base of {self.model_id} is no model of Transformers; it is cut")
        return self._engine.model

    @property
    def pool(self) -> AdapterPool:
        return self._pool

    def frozen_from_checkpoint(self, directory: str | Path) -> Adapter:
        """Return a frozen adapter with the weights of a directory written by :meth:`save` or by PEFT."""
        adapter = self._blank(str(directory), check_spec(checkpoint.read_spec(Path(directory))))
        self._read_into(adapter, lambda whole: checkpoint.load_adapter(whole, Path(directory), optimizer=False))
        return Adapter.frozen_copy(adapter)

    def frozen_from_weights(self, config: Mapping[str, object], weights: Mapping[str, Tensor]) -> Adapter:
        """Return a frozen adapter from weights by PEFT's names and the contents of their adapter_config.json."""
        adapter = self._blank("weights", check_spec(checkpoint.spec_of(config)))
        self._read_into(adapter, lambda whole: checkpoint.put_weights(whole, weights))
        return Adapter.frozen_copy(adapter)

    def set_aside(self, size: int) -> None:
        """Give up ``size`` bytes of the adapters' memory for another use of the device."""
        if not 0 <= size < self.memory.adapters:
            raise CapacityError(
                f"{size / 2**20:.0f} MiB are asked for, adapters have {self.memory.adapters / 2**20:.0f} MiB"
            )
        self.memory = dataclasses.replace(self.memory, adapters=self.memory.adapters - size)
        self._pool.shrink(self._pool_bytes())

    def _pool_bytes(self) -> int:
        """Return the bytes that adapters may take on the device.

        On a CPU paging out frees nothing, since device memory is host memory. Unless a memory budget was given,
        adapters are then limited by the host's memory only; the user of the trainer limits what they take of it
        (:meth:`host_bytes`).
        """
        return self.memory.adapters if self._has_budget else max(self.memory.adapters, host_memory_limit())

    # --- inside -------------------------------------------------------------------------------------------------------

    def _run(self, items: Sequence[TrainItem], *, train: bool) -> list[TrainResult | TrainFailure]:
        call = TrainerCall(
            self._passes,
            self._pool,
            self._budget,
            train=train,
            parallel=self._parallel,
            pipeline=self._pipeline,
            features=self._features,
            remote=self._remote,
        )
        results = call.run(items)
        self._budget = call.budget
        return results

    def _with_gradient(self, adapter_id: str) -> Adapter:
        """Return the adapter with its whole gradient: add up the parts of all ranks if that was not done yet."""
        adapter = self._pool.get(adapter_id)
        if adapter.divided:
            self._pool.make_resident([adapter])  # on all ranks: gradients are exchanged between devices
            self._unite_gradient(adapter)
        return adapter

    def _unite_gradient(self, adapter: Adapter) -> None:
        if adapter.divided:
            adapter.unite_gradient(self._cuts)

    def _blank(self, adapter_id: str, spec: LoraSpec) -> Adapter:
        layout = self._cuts.own(self._layout(spec))
        return Adapter.fresh(adapter_id, spec, self._pool.stack_for(layout), torch.zeros(layout.size))

    def _layout(self, spec: LoraSpec) -> RowLayout:
        """Return the layout of a whole adapter."""
        targets = select_targets(spec, self.architecture)
        return RowLayout.for_ranks(targets, check_ranks(spec, targets))

    def _gathered(self, adapter: Adapter, optimizer: bool) -> Adapter:
        """Return the whole adapter without its gradient; if nothing is cut, the adapter itself.

        Without ``optimizer`` the gathered adapter lacks that state.
        """
        if adapter.layout.cut is None:
            return adapter
        rows = (adapter.exp_avg_P, adapter.exp_avg_sq_P) if optimizer else ()
        moments = [self._cuts.gather(row_P, adapter.layout) for row_P in rows] or [torch.empty(0)] * 2
        return dataclasses.replace(
            adapter,
            stack=Stack(adapter.whole, self.dtype, self.device),
            weights_P=self._cuts.gather(adapter.weights_P, adapter.layout),
            exp_avg_P=moments[0],
            exp_avg_sq_P=moments[1],
            gradient_P=None,
            slot=None,
        )

    def _read_into(self, adapter: Adapter, read: Callable[[Adapter], None]) -> None:
        """Let ``read`` change an adapter, which it is given whole. It must replace weights and optimizer state."""
        if adapter.layout.cut is None:
            read(adapter)
            return
        stack = Stack(adapter.whole, self.dtype, self.device)
        whole = Adapter.fresh(adapter.adapter_id, adapter.spec, stack, torch.zeros(adapter.whole.size))
        read(whole)
        adapter.take_state(whole, lambda row_P: self._cuts.cut(row_P, adapter.layout))

    def _own_part(self, adapter: Adapter, whole_P: FloatArray) -> Tensor:
        return self._cuts.cut(torch.from_numpy(whole_P), adapter.layout)

    def _array(self, adapter: Adapter, own_P: Tensor) -> FloatArray:
        """Return a copy of a whole row, from this rank's part of it."""
        return self._cuts.gather(own_P, adapter.layout).cpu().numpy().copy()

    def _arrays(self, adapter: Adapter, own_P: Tensor) -> dict[str, FloatArray]:
        named = checkpoint.named_tensors(self._cuts.gather(own_P, adapter.layout), adapter.spec, adapter.whole)
        return {name: tensor.numpy().copy() for name, tensor in named.items()}  # a copy, not a view of the live weights
