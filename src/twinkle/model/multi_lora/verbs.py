"""The library's verbs for the adapters of an existing trainer: a thin layer over it.

``forward`` keeps its inputs, not an autograd graph; ``backward`` runs the forward pass again, with the gradient.
So any number of adapters may be between the two at the same time. ``forward_backward`` does without the first of
these forward passes.

Each pass is prepared, computed and absorbed. A server prepares the passes of many adapters one by one, and computes
them together in one call of the trainer.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.loss import Loss
from twinkle.metric import LossMetric, TrainMetric
from twinkle.model.library.components import check_no_values, loss_value
from twinkle.model.library.interface import TwinkleModel
from twinkle.model.library.optimizer_group import Guard, OptimizerGroup, check_accumulation, check_clipping
from twinkle.model.library.parallel_options import describe
from twinkle.model.library.parameter_groups import apply_optim_params
from twinkle.model.library.remote_verbs import at_once
from twinkle.model.library.router_replay import RouterReplayAction, read_action
from twinkle.model.library.sequences import SequenceBatch, check_micro_batch_size
from twinkle.model.library.training_state import checkpoint_path, find_checkpoint, is_due, say_missing
from twinkle.model.multi_lora.library_objective import check_task, needs_logits, wanted_output
from twinkle.model.multi_lora.optimizer import build_lora_optimizer, take_step
from twinkle.model.multi_lora.requests import LoraRequests
from twinkle.model.multi_lora.state import LoraState, PutGradient, StateTrainer
from twinkle.model.objectives.validation import in_terms_of_rows
from twinkle.model.parallel import ALONE, Ranks, first_does, together
from twinkle.model.types import (
    MAX_LOGITS,
    AdamParams,
    FloatArray,
    OutputKind,
    TrainFailure,
    TrainItem,
    TrainResult,
    VisionSpec,
)
from twinkle.utils.logger import note_once


class LoraTrainer(StateTrainer, Protocol):
    """The methods of a :class:`~twinkle.model.Trainer` that the verbs use."""

    def forward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]: ...

    def forward_backward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]: ...

    def optim_step(
        self, adapter_id: str, params: AdamParams, *, decoupled: bool = True, decay_norms: bool = True
    ) -> dict[str, float]: ...

    def optimizer_step(
        self, adapter_id: str, name: str, settings: Mapping[str, Any], *, decay_norms: bool = True
    ) -> dict[str, float]: ...

    def scale_gradient(self, adapter_id: str, factor: float) -> None: ...

    def gradient_norm(self, adapter_id: str, norm_type: float = 2.0) -> float: ...

    def zero_grad(self, adapter_id: str) -> None: ...

    def vocabulary_size(self) -> int: ...

    def weights(self, adapter_id: str) -> dict[str, FloatArray]: ...

    def shapes(self, adapter_id: str) -> dict[str, tuple[int, ...]]: ...

    def peft_config(self, adapter_id: str) -> dict[str, object]: ...


@dataclass(frozen=True)
class PreparedPass:
    """A pass that is ready to be computed. ``absorb`` stores its result and returns the outputs of the verb."""

    item: TrainItem
    train: bool  # whether to compute the gradient
    absorb: Callable[[TrainResult], dict[str, Any]]


class LoraVerbs(TwinkleModel):
    """The verbs for the adapters of a trainer. They need ``adapter_name``; adapters do not affect each other.

    Whoever creates an adapter in the trainer also adds its optimizer group, with :meth:`add_adapter_to_model`.
    """

    def __init__(
        self,
        trainer: LoraTrainer,
        model_id: str | PathLike[str],
        tokenizer_id: str | PathLike[str] | None,
        max_length: int,
        *,
        process_state: bool,
        device_mesh: DeviceMesh | None = None,
        ranks: Ranks = ALONE,
        data_ranks: Ranks | None = None,
        guard: Guard = nullcontext,
        max_logits: int = MAX_LOGITS,
        vision: VisionSpec | None = None,
    ) -> None:
        """process_state: whether checkpoints include the tokenizer and the states of random generators.

        It is False where tenants share this process. max_logits: the most logits that one request may compute. ranks
        and data_ranks, vision: see :class:`TwinkleModel`.
        """
        super().__init__(model_id, tokenizer_id, device_mesh, ranks, data_ranks, vision)
        self._max_length, self._max_logits = max_length, max_logits
        self._process_state = process_state
        self._guard = guard
        self._use(trainer)

    def _use(self, trainer: LoraTrainer, put_gradient: PutGradient | None = None) -> None:
        """Let the verbs run on this trainer from now on. ``put_gradient``: see :class:`LoraState`."""
        self._lora_trainer = trainer
        self._requests = LoraRequests(trainer, self._max_length, self._max_logits)
        tokenizer = self.tokenizer_id if self._process_state else None
        self.state = LoraState(
            trainer,
            tokenizer,
            process_state=self._process_state,
            ranks=self._data_ranks,
            put_gradient=put_gradient,
        )

    # --- adapters -----------------------------------------------------------------------------------------------------

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int = 1
    ) -> None:
        """Add an optimizer group for an adapter that the trainer has already.

        ``config_or_dir``: the fields of PEFT's LoraConfig as a mapping.
        """
        self.optimizer_group[adapter_name] = self._new_group(adapter_name, config_or_dir, gradient_accumulation_steps)

    # --- passes -------------------------------------------------------------------------------------------------------

    def prepare_forward(
        self,
        *,
        inputs: object,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        disable_lora: bool = False,
        training: bool = False,
        micro_batch_size: int | None = None,
        router_replay_action: object = None,
        **kwargs: Any,
    ) -> PreparedPass:
        """Prepare a forward pass. ``training``: a backward pass may follow."""
        _accept_micro_batch_size(micro_batch_size)
        action = read_action(router_replay_action)
        group = self._group(adapter_name)
        output = wanted_output(group.loss_instance, task, return_logits=return_logits)
        status, batch = self._begin_forward(group, inputs, kwargs, training=training, action=action)
        _check_labels(batch, output)
        item = self._requests.forward_item(
            group,
            status,
            batch,
            temperature,
            output,
            without_adapter=disable_lora,
            training=training,
            records_routes=action is RouterReplayAction.RECORD,
        )

        def absorb(result: TrainResult) -> dict[str, Any]:
            outputs = self._requests.outputs(group, status, batch, result, output)
            kept = _kept(group, outputs)
            group.begin(status, batch, kept, kwargs, temperature)
            return _returned(kept, outputs, return_logits=return_logits)

        return PreparedPass(item, False, absorb)

    def prepare_forward_backward(
        self,
        *,
        inputs: object,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        gradient_accumulation_steps: int | None = None,
        micro_batch_size: int | None = None,
        router_replay_action: object = None,
        **kwargs: Any,
    ) -> PreparedPass:
        _accept_micro_batch_size(micro_batch_size)
        action = read_action(router_replay_action)
        group = self._group(adapter_name)
        output = wanted_output(group.loss_instance, task, return_logits=return_logits)
        check_task(group.loss_instance, task)
        check_accumulation(gradient_accumulation_steps)
        status, batch = self._begin_forward(group, inputs, kwargs, training=True, action=action)
        _check_labels(batch, output)
        records = action is RouterReplayAction.RECORD
        request = self._requests.train_request(
            group, batch, temperature, kwargs, output, returned=return_logits, records_routes=records
        )

        def absorb(result: TrainResult) -> dict[str, Any]:
            group.set_accumulation(gradient_accumulation_steps)
            outputs = self._requests.outputs(group, status, batch, result, request.item.output)
            loss, kept = result.metrics["loss:sum"], _kept(group, outputs)
            group.begin(status, batch, kept, kwargs, temperature)
            status.has_loss(loss, loss, request.num_tokens())
            group.after_backward()
            return _returned(kept, outputs, return_logits=return_logits)

        return PreparedPass(request.item, True, absorb)

    def prepare_backward(
        self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None
    ) -> PreparedPass:
        group = self._group(adapter_name)
        status = group.train_status
        batch, outputs = status.computed("backward")
        if not group.training or status.loss_value is None:
            raise UserError("backward: there is no loss to go back from; call forward and calculate_loss first")
        group.set_accumulation(gradient_accumulation_steps)
        task = "embedding" if "embeddings" in outputs else "causal_lm"
        output = wanted_output(group.loss_instance, task, return_logits=False)
        request = self._requests.train_request(group, batch, status.temperature, status.forward_kwargs, output)

        def absorb(_result: TrainResult) -> dict[str, Any]:
            group.after_backward()
            return outputs

        return PreparedPass(request.item, True, absorb)

    def _compute(self, prepare: Callable[[], PreparedPass]) -> dict[str, Any]:
        """Compute one pass by itself, and absorb its result. If it fails, raise its error; its gradient is not kept."""
        prepared = together(self._ranks, prepare)
        run = self._lora_trainer.forward_backward if prepared.train else self._lora_trainer.forward
        outcome = run([self._numbered(prepared.item)])[0]
        if isinstance(outcome, TrainFailure):
            raise in_terms_of_rows(outcome.error)
        return prepared.absorb(outcome)

    def _numbered(self, item: TrainItem) -> TrainItem:
        """Number the sequences as one process would. Data ranks have consecutive parts of a batch, in their order."""
        if self._data_ranks.size == 1:
            return item
        counts = self._data_ranks.gather(len(item.data))
        first = sum(counts[: self._data_ranks.number])
        return replace(item, numbers=range(first, first + len(item.data)))

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        *,
        inputs: object,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        **kwargs: Any,
    ) -> dict[str, Any]:
        return self._compute(
            lambda: self.prepare_forward(
                inputs=inputs,
                adapter_name=adapter_name,
                temperature=temperature,
                return_logits=return_logits,
                task=task,
                training=True,
                **kwargs,
            )
        )

    def forward_only(
        self,
        *,
        inputs: object,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        disable_lora: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return self._compute(
            lambda: self.prepare_forward(
                inputs=inputs,
                adapter_name=adapter_name,
                temperature=temperature,
                return_logits=return_logits,
                task=task,
                disable_lora=disable_lora,
                **kwargs,
            )
        )

    def calculate_loss(self, *, adapter_name: str | None = None, **kwargs: Any) -> float:
        group = self._group(adapter_name)
        status = group.status
        batch, outputs = status.computed("calculate_loss")
        arguments = self._loss_arguments(group, kwargs)
        value = tokens = 0.0
        if not batch.empty:
            with torch.no_grad(), group.guard("the loss failed"):
                loss, tokens = loss_value(group.loss_instance, batch.loss_inputs, outputs, arguments)
            value = float(loss)
        self._keep_loss(status, value, value, tokens)
        return value

    def backward(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        self._compute(
            lambda: self.prepare_backward(
                adapter_name=adapter_name, gradient_accumulation_steps=gradient_accumulation_steps
            )
        )

    def forward_backward(
        self,
        *,
        inputs: object,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        gradient_accumulation_steps: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return self._compute(
            lambda: self.prepare_forward_backward(
                inputs=inputs,
                adapter_name=adapter_name,
                temperature=temperature,
                return_logits=return_logits,
                task=task,
                gradient_accumulation_steps=gradient_accumulation_steps,
                **kwargs,
            )
        )

    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        check_clipping(max_grad_norm, norm_type)
        group = self._group(adapter_name)
        group.set_accumulation(gradient_accumulation_steps)
        if not group.at_boundary:
            return None
        self._normalize(group)
        norm = self._lora_trainer.gradient_norm(group.adapter_name, float(norm_type))
        if norm > max_grad_norm:  # as torch.nn.utils.clip_grad_norm_ does it
            self._lora_trainer.scale_gradient(group.adapter_name, min(1.0, max_grad_norm / (norm + 1e-6)))
        group.last_grad_norm = norm
        return norm

    def step(
        self,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        optim_params: Mapping[str, Any] | None = None,
    ) -> None:
        group = self._group(adapter_name)
        group.set_accumulation(gradient_accumulation_steps)
        optimizer = group.required_optimizer("step")
        if not group.at_boundary:
            return
        if optim_params is not None:
            apply_optim_params(optimizer, optim_params)
        self._normalize(group)
        take_step(self._lora_trainer, group.adapter_name, optimizer)
        optimizer.step()  # changes no weights; without it, schedulers warn that they ran before the optimizer
        group.last_lr = tuple(group.lr)
        group.drop_window()

    def zero_grad(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        group = self._group(adapter_name)
        group.set_accumulation(gradient_accumulation_steps)
        if group.at_boundary:
            self._lora_trainer.zero_grad(group.adapter_name)
            group.drop_window()

    def set_optimizer(
        self,
        optimizer_cls: object,
        lr: float = 1e-5,
        weight_decay: float = 0.01,
        params: object = None,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        if params is not None:
            raise UnsupportedError("params: an adapter of a multi-LoRA model is trained as a whole")
        group = self._group(adapter_name)
        group.optimizer = build_lora_optimizer(optimizer_cls, lr, weight_decay, options)
        group.lr_scheduler = None

    # --- state --------------------------------------------------------------------------------------------------------

    def save(
        self,
        name: str | None = None,
        output_dir: str | PathLike[str] | None = None,
        interval: int = 1,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
    ) -> str | None:
        group = self._group(adapter_name)
        if not is_due(group, interval):
            return None
        directory = checkpoint_path(group, name, output_dir)
        write = self.state.prepare_save(
            group, save_optimizer=save_optimizer, consumed_train_samples=consumed_train_samples
        )
        first_does(self._ranks, lambda: write(directory))
        return str(directory)

    def load(
        self,
        name: str,
        output_dir: str | PathLike[str] | None = None,
        *,
        adapter_name: str | None = None,
        load_optimizer: bool = False,
        token: str | None = None,
    ) -> None:
        """Load an adapter's weights; with ``load_optimizer`` all state, as :meth:`resume_from_checkpoint` does."""
        directory = find_checkpoint(name, output_dir, token)
        self.resume_from_checkpoint(str(directory), resume_only_model=not load_optimizer, adapter_name=adapter_name)

    def resume_from_checkpoint(
        self, checkpoint_dir: str | PathLike[str], *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        directory = Path(checkpoint_dir)
        progress, missing = self.state.resume(self._group(adapter_name), directory, resume_only_model=resume_only_model)
        say_missing(directory, missing)
        return progress

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Tensor]:
        weights = self._lora_trainer.weights(self._group(adapter_name).adapter_name)
        return {name: torch.from_numpy(array) for name, array in weights.items()}

    @at_once
    def get_peft_config_dict(self, *, adapter_name: str | None = None) -> dict[str, object]:
        """Return the contents of the adapter's adapter_config.json."""
        return self._lora_trainer.peft_config(self._group(adapter_name).adapter_name)

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        group = self._group(adapter_name)
        shapes = self._lora_trainer.shapes(group.adapter_name)
        # A group without a configuration trains all parameters, and has no adapter.
        config = self.get_peft_config_dict(adapter_name=adapter_name) if group.adapter_config else None
        return describe(group, self.model_id, config, shapes)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _group(self, adapter_name: str | None) -> OptimizerGroup:
        if adapter_name is None:
            known = ", ".join(self.optimizer_group) or "none yet: call add_adapter_to_model"
            raise InvalidInputError("adapter_name", None, f"the name of an adapter ({known})")
        if adapter_name not in self.optimizer_group:
            raise UnknownNameError("adapter", adapter_name, self.optimizer_group or ("none",))
        return self.optimizer_group[adapter_name]

    def _new_group(
        self, adapter_name: str, config: Mapping[str, object], gradient_accumulation_steps: int
    ) -> OptimizerGroup:
        group = OptimizerGroup(adapter_name, config, gradient_accumulation_steps, guard=self._guard)
        # Accuracy is not among the defaults: it needs the most likely token of every row, which CUDA's fast head
        # kernels do not compute.
        for status in (group.train_status, group.eval_status):
            status.metrics += [metric(self.device_mesh, self._data_ranks.group) for metric in (LossMetric, TrainMetric)]
        return group

    def _check_loss(self, loss: Loss) -> None:
        """Accept all losses but those on values: the Trainer computes the logits or embeddings that others read."""
        check_no_values(loss)

    def _normalize(self, group: OptimizerGroup) -> None:
        divisor = group.take_divisor(self._data_ranks)
        if divisor is not None:
            self._lora_trainer.scale_gradient(group.adapter_name, 1.0 / divisor)


def _accept_micro_batch_size(micro_batch_size: int | None) -> None:
    if micro_batch_size is not None:
        check_micro_batch_size(micro_batch_size)
        note_once(
            "micro_batch_size: no effect; a multi-LoRA model divides batches by itself, so that they fit into memory"
        )


def _check_labels(batch: SequenceBatch, output: OutputKind) -> None:
    if batch.pooled_labels is not None and output != "embeddings":
        raise InvalidInputError("inputs.labels", "one for each text", "one for each token, or task='embedding'")


def _kept(group: OptimizerGroup, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs that a group keeps until its next pass: logits only if its loss reads them."""
    keeps_logits = needs_logits(group.loss_instance)
    return {name: value for name, value in outputs.items() if name != "logits" or keeps_logits}


def _returned(kept: dict[str, Any], outputs: Mapping[str, Any], *, return_logits: bool) -> dict[str, Any]:
    """Return the outputs for the caller: the kept ones with their loss, and logits if they were asked for."""
    if return_logits == ("logits" in kept):
        return kept
    if return_logits:
        return {**kept, "logits": outputs["logits"]}
    return {name: value for name, value in kept.items() if name != "logits"}
