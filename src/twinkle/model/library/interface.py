"""The verbs that every model of the library has.

One step of training is ``forward`` → ``calculate_loss`` → ``backward`` (or ``forward_backward``) → ``clip_grad_norm`` →
``step`` → ``zero_grad`` → ``lr_step`` (or ``clip_grad_and_step``). The last four do nothing until a window of
``gradient_accumulation_steps`` backward passes is complete. The gradient of a window is divided by its number of
tokens before it is clipped or, without clipping, before the optimizer step. For losses that are means it is divided by
the number of backward passes instead. Gradient and tokens are summed over all processes that train together.

The verbs keep the state of an adapter in its :class:`~twinkle.model.library.optimizer_group.OptimizerGroup`.
:class:`TwinkleModel` implements what all models have in common; its subclasses add the computation.

The decorators define how a verb runs on a worker group (see :mod:`twinkle.model.library.remote_verbs`); in a single
process they do nothing.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from torch import Tensor

from twinkle.errors import InvalidInputError, NonFiniteError, UnsupportedError
from twinkle.hub import HubOperation
from twinkle.hub.model_id import id_text
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.loss import Loss
from twinkle.metric import Metric
from twinkle.model.library.components import (
    build_loss,
    build_metric,
    build_processor,
    build_scheduler,
    build_template,
    check_forward_arguments,
)
from twinkle.model.library.optimizer_group import OptimizerGroup, TrainStatus, accumulate_metrics
from twinkle.model.library.remote_verbs import at_once, averaged, by_first, on_rows, promised
from twinkle.model.library.router_replay import RouterReplayAction, with_routes
from twinkle.model.library.sequences import (
    NO_SEQUENCES,
    SequenceBatch,
    as_feature_list,
    encode,
    split_batch,
    take_placed,
)
from twinkle.model.parallel import ALONE, Ranks, together
from twinkle.model.types import VisionSpec


class TwinkleModel(ABC):
    """A model that can be trained. ``optimizer_group`` has one entry per adapter, or one named "" for a full model."""

    def __init__(
        self,
        model_id: str | PathLike[str],
        tokenizer_id: str | PathLike[str] | None,
        device_mesh: DeviceMesh | None = None,
        ranks: Ranks = ALONE,
        data_ranks: Ranks | None = None,
        vision: VisionSpec | None = None,
    ) -> None:
        """tokenizer_id: None for a model made from a config, which only accepts inputs that are encoded already.

        ranks: the processes of the mesh. All must call the same verbs in the same order; some may have empty inputs.
        data_ranks: one rank of each sequence group, so that a sum over them counts every row once; None: all ranks.
        vision: what the model wants of images in rows; None: it reads text only.
        """
        self.model_id = id_text(model_id)
        self.tokenizer_id = None if tokenizer_id is None else id_text(tokenizer_id)
        self.device_mesh = device_mesh
        self._ranks = ranks
        self._data_ranks = ranks if data_ranks is None else data_ranks
        self._vision = vision
        self.optimizer_group: dict[str, OptimizerGroup] = {}

    @property
    def ranks(self) -> Ranks:
        """Return the group of processes that train together; all must call the same verbs."""
        return self._ranks

    # --- computing ----------------------------------------------------------------------------------------------------

    @on_rows
    @abstractmethod
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
        """Return the model's outputs for ``inputs``, which are features or trajectories. ``kwargs`` go to the loss.

        ``micro_batch_size``, in this method, ``forward_only`` and ``forward_backward``: how many sequences are computed
        at a time. It changes the memory that is needed, and no result. ``router_replay_action``, in the same methods of
        models that can record routes to experts: see :mod:`twinkle.model.library.router_replay`.
        """

    @on_rows
    @abstractmethod
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
        """Return the outputs like :meth:`forward`, but for evaluation, without gradients."""

    @averaged
    @abstractmethod
    def calculate_loss(self, *, adapter_name: str | None = None, **kwargs: Any) -> float:
        """Return the loss of the last forward pass. ``kwargs`` go to the loss."""

    @promised
    @abstractmethod
    def backward(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        """Compute the gradient of the last loss, and add it to that of the window (the passes since the last step)."""

    @on_rows
    @abstractmethod
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
        """Run forward, calculate_loss and backward. "loss" in the outputs is a number."""

    @promised
    @abstractmethod
    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        """Normalise and clip the gradient. Return its norm before clipping, or None inside a window."""

    @promised
    @abstractmethod
    def step(
        self,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        optim_params: Mapping[str, Any] | None = None,
    ) -> None:
        """Update the weights; do nothing inside a window.

        ``optim_params`` first sets lr (and weight_decay, eps, betas) of Adam or AdamW.
        """

    @promised
    @abstractmethod
    def zero_grad(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        """Drop the gradient; do nothing inside a window."""

    @promised
    def lr_step(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        """Advance the learning-rate scheduler, if there is one; do nothing inside a window."""
        group = self._group(adapter_name)
        group.set_accumulation(gradient_accumulation_steps)
        if group.at_boundary and group.lr_scheduler is not None:
            with group.guard("lr_step"):
                group.lr_scheduler.step()

    @promised
    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        optim_params: Mapping[str, Any] | None = None,
    ) -> float | None:
        """Run clip_grad_norm, step, zero_grad and lr_step. Return the norm before clipping, or None inside a window."""
        self._group(adapter_name).set_accumulation(gradient_accumulation_steps)
        norm = self.clip_grad_norm(max_grad_norm, norm_type, adapter_name=adapter_name)
        self.step(adapter_name=adapter_name, optim_params=optim_params)
        self.zero_grad(adapter_name=adapter_name)
        self.lr_step(adapter_name=adapter_name)
        return norm

    # --- setting up ---------------------------------------------------------------------------------------------------

    @at_once
    def set_loss(self, loss_cls: object, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set the loss: a name in :mod:`twinkle.loss`, class, instance, plugin id, or function of inputs, outputs."""
        loss = build_loss(loss_cls, options)
        self._check_loss(loss)
        group = self._group(adapter_name)
        group.loss_instance = loss
        group.chosen.add("set_loss")

    @at_once
    @abstractmethod
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
        """Set the optimizer, a name in ``torch.optim`` or a class with its ``options``, and remove the scheduler."""

    @at_once
    def set_lr_scheduler(self, scheduler_cls: object, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set the learning-rate scheduler.

        It is a name in ``torch.optim.lr_scheduler`` or :mod:`twinkle.module.scheduler`, a class, a plugin id, or an
        instance.
        """
        group = self._group(adapter_name)
        optimizer = group.required_optimizer("set_lr_scheduler")
        group.lr_scheduler = build_scheduler(scheduler_cls, optimizer, options)

    @at_once
    def set_template(self, template_cls: object, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set the template that encodes trajectories. A class or name is constructed with this model's tokenizer."""
        if isinstance(template_cls, str | type):
            options["model_id"] = self.tokenizer_id
        group = self._group(adapter_name)
        group.template = build_template(template_cls, options)
        group.chosen.add("set_template")

    @at_once
    def set_processor(self, processor_cls: object, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set the processor, which makes a batch from features."""
        group = self._group(adapter_name)
        group.processor = build_processor(processor_cls, options)
        group.chosen.add("set_processor")

    @at_once
    def add_metric(
        self, metric_cls: object, is_training: bool | None = None, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Add a metric to training, to evaluation or (None) to both; then each gets its own instance."""
        group = self._group(adapter_name)
        if is_training is None and isinstance(metric_cls, Metric):
            raise InvalidInputError("is_training", None, "True or False: one metric instance cannot serve both")
        places = (self.device_mesh, self._data_ranks.group)
        for status in (group.train_status, group.eval_status):
            if is_training is None or is_training == (status is group.train_status):
                metric = build_metric(metric_cls, options, *places, alone=self._ranks.size == 1)
                status.metrics.append(metric)
        group.chosen.add("add_metric")

    @at_once
    def calculate_metric(self, is_training: bool, *, adapter_name: str | None = None) -> dict[str, Any]:
        """Return the results of the training (or evaluation) metrics since the last call.

        They include the last forward pass if its loss is known.
        """
        group = self._group(adapter_name)
        status = group.train_status if is_training else group.eval_status
        accumulate_metrics(group, status)
        status.clear()
        result: dict[str, Any] = {}
        for metric in status.metrics:
            with group.guard(type(metric).__name__):
                result |= metric.calculate()
                metric.reset()  # also metrics that report running totals, which would grow without end here
        return result

    @at_once
    @abstractmethod
    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: object, *, gradient_accumulation_steps: int = 1
    ) -> None:
        """Add a LoRA adapter with its own optimizer group."""

    @at_once
    def apply_patch(self, patch_cls: object, **options: Any) -> None:
        raise UnsupportedError("apply_patch: adapters share their base model, and nobody may change it for the others")

    @at_once
    def set_grad_scaler(self, *, adapter_name: str | None = None, **options: Any) -> None:
        raise UnsupportedError("set_grad_scaler: gradients are scaled for fp16 only; use mixed_precision='bf16'")

    # --- state --------------------------------------------------------------------------------------------------------

    @at_once
    @abstractmethod
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
        """Write a checkpoint and return its directory; return None if cur_step is no multiple of ``interval``."""

    @at_once
    @abstractmethod
    def load(
        self,
        name: str,
        output_dir: str | PathLike[str] | None = None,
        *,
        adapter_name: str | None = None,
        load_optimizer: bool = False,
        token: str | None = None,
    ) -> None:
        """Read the weights of an adapter or a whole model, with ``load_optimizer`` all its state.

        They come from a directory or a hub repository.
        """

    @at_once
    @abstractmethod
    def resume_from_checkpoint(
        self, checkpoint_dir: str | PathLike[str], *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        """Restore the state of ``save(save_optimizer=True)``; with ``resume_only_model``, the weights alone.

        Returns cur_step, consumed_train_samples and gradient_accumulation_steps.
        """

    @promised
    @abstractmethod
    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Any]:
        """Return the trainable parameters by name."""

    @at_once
    @abstractmethod
    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Return a readable description of what is trained, and how."""

    @by_first
    def upload_to_hub(
        self,
        checkpoint_dir: str | PathLike[str],
        hub_model_id: str,
        hub_token: str | None = None,
        async_upload: bool = True,
    ) -> None:
        """Push a checkpoint to a private repository, by default in the background."""
        if not Path(checkpoint_dir).is_dir():
            raise InvalidInputError("checkpoint_dir", checkpoint_dir, "an existing directory")
        push = HubOperation.async_push_to_hub if async_upload else HubOperation.push_to_hub
        push(hub_model_id, fspath(checkpoint_dir), token=hub_token, private=True)

    # --- inside -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _group(self, adapter_name: str | None) -> OptimizerGroup:
        """Return the optimizer group for the ``adapter_name`` of a verb; raise if there is none."""

    @abstractmethod
    def _check_loss(self, loss: Loss) -> None:
        """Raise for a loss that this model cannot compute."""

    def _begin_forward(
        self,
        group: OptimizerGroup,
        inputs: object,
        kwargs: Mapping[str, Any],
        *,
        training: bool,
        action: RouterReplayAction | None = None,
    ) -> tuple[TrainStatus, SequenceBatch]:
        """Make the batch of a forward pass. Return it with the status (training or evaluation) that it belongs to.

        The pass before it is given to the metrics first. ``action``: whether the pass replays routes.
        """
        status = group.train_status if training else group.eval_status
        check_forward_arguments(kwargs, group.loss_instance, status.metrics)
        batch = together(self._ranks, lambda: self._checked(with_routes(self._batch(group, inputs), action)))
        if training and not batch.empty and not batch.has_targets:
            warnings.warn("every label of this batch is −100: nothing is learned from it", stacklevel=4)
        accumulate_metrics(group, status)
        return status, batch

    def _checked(self, batch: SequenceBatch) -> SequenceBatch:
        """Return a batch that this model can compute; raise for one that it cannot."""
        return batch

    def _batch(self, group: OptimizerGroup, inputs: object) -> SequenceBatch:
        if self._ranks.size > 1 and isinstance(inputs, Sequence) and not inputs:
            return NO_SEQUENCES
        features = encode(as_feature_list(inputs), lambda: self._template(group))
        if group.processor is None:
            group.processor = build_processor("InputProcessor", {})
        features, images = take_placed(features)
        with group.guard(type(group.processor).__name__):
            batch = split_batch(group.processor(features), self._vision)
        return batch.with_images(images) if images else batch

    def _keep_loss(self, status: TrainStatus, graph: Tensor | float, value: float, tokens: float) -> None:
        """Store the loss of the last forward pass. If it is not finite on one rank, raise on all ranks."""
        try:
            together(self._ranks, lambda: status.has_loss(graph, value, tokens))
        except NonFiniteError:
            status.clear()
            raise

    def _loss_arguments(self, group: OptimizerGroup, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords for the loss of the last forward pass: those of forward and ``kwargs``.

        They are stored, so that metrics get them too.
        """
        check_forward_arguments(kwargs, group.loss_instance, group.status.metrics)
        group.status.forward_kwargs |= kwargs
        return group.status.forward_kwargs

    def _template(self, group: OptimizerGroup) -> Any:
        if group.template is None and self.tokenizer_id is None:
            raise InvalidInputError("tokenizer_id", None, "the id of a tokenizer, to encode trajectories with")
        if group.template is None:
            group.template = build_template("Template", {"model_id": self.tokenizer_id})
        return group.template
