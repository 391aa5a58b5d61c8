"""One Hugging Face model trained with plain autograd: all its parameters or PEFT adapters, and any torch optimizer.

Precision: weights that are trained are fp32 (unless ``dtype`` says otherwise), so that updates too small for bf16 are
not lost. With ``mixed_precision="bf16"`` products run under bf16 autocast, and a base model that is frozen under
adapters is stored in bf16. That is the default where the hardware has bf16 instructions; without them these products
are some 200 times slower than in fp32, and the default is fp32. Losses and log-probabilities are always fp32.

With a device mesh every process trains on its own data. Along the mesh's dimension fsdp the model is cut into shards
when it is first used. PEFT adapters are not sharded, and must be added before that. With ``ulysses_size`` > 1, the
ranks of a sequence group get the same data, and divide the computation of its tokens.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedConfig

from twinkle.errors import (
    InvalidInputError,
    NonFiniteError,
    UnknownNameError,
    UnsupportedError,
    UserError,
)
from twinkle.hub.resolution import loadable_name
from twinkle.infra import adapter_seed, remote_class
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.loss import Loss
from twinkle.metric import Accuracy, LossMetric, Metric, TrainMetric
from twinkle.model.decoder.architecture import find_layers, read_vision
from twinkle.model.decoder.precision import hide_bf16_trace
from twinkle.model.decoder.products import bf16_is_slow
from twinkle.model.library.components import check_no_values, guarded_loss_value
from twinkle.model.library.interface import TwinkleModel
from twinkle.model.library.optimizer_group import OptimizerGroup, TrainStatus, check_clipping
from twinkle.model.library.parallel_options import check_parallel_options, choose_precision, describe
from twinkle.model.library.parameter_groups import apply_optim_params, build_optimizer, trained_parameters
from twinkle.model.library.remote_verbs import at_once, gathered
from twinkle.model.library.router_replay import RouterReplayAction, read_action, routes_of
from twinkle.model.library.sequences import ROUTES, SequenceBatch, check_vocabulary
from twinkle.model.library.training_state import checkpoint_path, find_checkpoint, is_due
from twinkle.model.objectives.validation import check_routes
from twinkle.model.parallel import copy_from_first, own_device, read_mesh
from twinkle.model.trainer.sharding import shard_trained, whole
from twinkle.model.transformers import gradients
from twinkle.model.transformers.causal_forward import Asked, CausalForward, watched_routers
from twinkle.model.transformers.loading import load_for_training
from twinkle.model.transformers.micro_batches import Pass, Passes, split
from twinkle.model.transformers.outgoing import OutgoingWeights
from twinkle.model.transformers.peft_adapters import PeftAdapters
from twinkle.model.transformers.sequence_parallel import check_lengths, check_same_rows
from twinkle.model.transformers.state import PlainState
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.model.weights.channel import WeightChannel
from twinkle.model.weights.offer import BaseModel, WeightsOffer
from twinkle.patch.interface import make_patch
from twinkle.utils.logger import get_logger, note_once

_TASKS = ("causal_lm", "embedding", "fused_lm_ce")


@remote_class()
class TransformersModel(TwinkleModel, WeightChannel):
    """A Hugging Face model with the library's verbs. ``model`` is that model, or PEFT's wrapper if it has adapters.

    Without adapters all parameters are one group, named "". A verb without ``adapter_name`` uses ``active_group``, the
    adapter that was added last. ``gradient_checkpointing`` saves memory and costs time. ``enable_router_replay``: its
    passes take a ``router_replay_action`` (:mod:`twinkle.model.library.router_replay`). Further keywords go to
    ``from_pretrained``.
    """

    # A value model has others: it replaces the head, and has no distribution over tokens.
    _load_model = staticmethod(load_for_training)
    _default_metrics: tuple[type[Metric], ...] = (LossMetric, Accuracy, TrainMetric)

    def __init__(
        self,
        model_cls: object = None,
        model_id: str | PathLike[str] | None = None,
        config: PreTrainedConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: str | None = None,
        strategy: str = "accelerate",
        ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        *,
        tokenizer_id: str | PathLike[str] | None = None,
        device: str | torch.device | None = None,
        gradient_checkpointing: bool = False,
        enable_router_replay: bool = False,
        **load_options: Any,
    ) -> None:
        self._reshards = check_parallel_options(
            device_mesh=device_mesh,
            strategy=strategy,
            ddp_config=ddp_config,
            fsdp_config=fsdp_config,
            grad_scaler_config=grad_scaler_config,
            memory_efficient_init=memory_efficient_init,
        )
        self.device = self.weights_device = own_device(device, device_mesh)
        self._parallel = parallel = read_mesh(device_mesh, self.device, cuts_sequences=True)
        tokenizer_id = tokenizer_id or model_id
        super().__init__(model_id or "(made from a config)", tokenizer_id, device_mesh, parallel.ranks, parallel.data)
        self._half = choose_precision(mixed_precision, self.device) == "bf16"
        if self._half and bf16_is_slow(self.device.type):
            get_logger().warning(
                "mixed_precision: got 'bf16', and this CPU has no instructions for it: products take some 200 times "
                "as long as in fp32; without mixed_precision the model computes in fp32 here"
            )
            hide_bf16_trace()
        place = torch.device("cpu") if parallel.sharded else self.device  # the shards move to the device later
        attention = load_options.pop("attn_implementation", None)
        plain = self._load_model(model_id, model_cls, config, place, load_options)
        if model_id is None:
            copy_from_first(parallel.ranks, plain.parameters())
        self._routers = watched_routers(plain, parallel) if enable_router_replay else None
        if gradient_checkpointing:
            replays = {} if self._routers is None else {"context_fn": self._routers.recomputation}
            plain.gradient_checkpointing_enable({"use_reentrant": False, **replays})
        self.hf_config: PreTrainedConfig = plain.config
        self._plain = plain
        self._vocabulary = int(plain.get_input_embeddings().num_embeddings)
        self._vision = read_vision(plain)
        several = self._vision is not None and parallel.sharded
        self._forward_pass = CausalForward(plain, parallel.sequence, self._vision, self._routers, tower_always=several)
        if attention is not None and self._forward_pass.packed:
            note_once("attn_implementation: no effect; this family runs on packed sequences with attention of our own")
        elif attention is not None:
            plain.set_attn_implementation(attention)
        self._passes = Passes(self._forward_pass, self.device, half=self._half)
        self._adapters = PeftAdapters(plain, half_base=self._half)
        base_name = self.model_id if model_id is None else loadable_name(model_id)
        self._state = PlainState(plain, self._adapters, parallel, base_name, self.tokenizer_id)
        self._in_shards = False
        self._outgoing = OutgoingWeights(plain, self._adapters, owner=self)
        self.active_group = ""
        self._add_group(OptimizerGroup(""))

    @property
    def model(self) -> nn.Module:
        return self._plain if self._adapters.wrapper is None else self._adapters.wrapper

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any,
        is_trainable: bool = True,
        *,
        gradient_accumulation_steps: int = 1,
        seed: int | None = None,
    ) -> None:
        """Add an adapter. ``config_or_dir``: PEFT's LoraConfig, or a directory or hub repository with an adapter.

        seed: that of the initial weights, by default made of the seed of ``initialize`` and the adapter's name. With a
        seed, a config with PEFT's default ``init_lora_weights`` gives the weights that a MultiLoraTransformersModel and
        a server give; otherwise PEFT draws them from torch's generator.
        """
        if not isinstance(adapter_name, str) or not adapter_name:
            raise InvalidInputError("adapter_name", adapter_name, "a name")
        if self._in_shards:
            raise UserError("add_adapter_to_model: the model is sharded already; add adapters before other calls")
        full = self.optimizer_group.get("")
        if full is not None and full.chosen:
            raise UserError(
                f"add_adapter_to_model: {', '.join(sorted(full.chosen))} came before it and was for all parameters, "
                "which an adapter freezes; add adapters first"
            )
        group = OptimizerGroup(adapter_name, None, gradient_accumulation_steps)
        self._adapters.add(adapter_name, config_or_dir, is_trainable)
        seed = adapter_seed(adapter_name) if seed is None else seed
        if seed is not None and not isinstance(config_or_dir, str | Path):
            self._adapters.draw_weights(adapter_name, seed)
        copy_from_first(self._ranks, trained_parameters(self.model, adapter_name).values())
        self.optimizer_group.pop("", None)  # the group of all parameters, which are frozen now
        group.adapter_config = self._adapters.config(adapter_name)
        self._add_group(group)

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        *,
        inputs: object,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        micro_batch_size: int | None = None,
        router_replay_action: object = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        group = self._group(adapter_name, activate=True)
        action = read_action(router_replay_action)
        one = self._begin(
            group, inputs, temperature, return_logits, task, kwargs, micro_batch_size, action, training=True
        )
        group.begin(one.status, one.batch, self._passes.outputs(one), kwargs, temperature)
        return _detached(group.train_status.computed("forward")[1])

    def forward_only(
        self,
        *,
        inputs: object,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        disable_lora: bool = False,
        micro_batch_size: int | None = None,
        router_replay_action: object = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        group = self._group(adapter_name, activate=True)
        action = read_action(router_replay_action)
        with torch.no_grad(), self._adapters.disabled() if disable_lora else nullcontext():
            one = self._begin(
                group, inputs, temperature, return_logits, task, kwargs, micro_batch_size, action, training=False
            )
            group.begin(one.status, one.batch, self._passes.outputs(one), kwargs, temperature)
        return _detached(group.eval_status.computed("forward_only")[1])

    def calculate_loss(self, *, adapter_name: str | None = None, **kwargs: Any) -> float:
        group = self._group(adapter_name)
        status = group.status
        batch, outputs = status.computed("calculate_loss")
        arguments = self._loss_arguments(group, kwargs)
        if batch.empty:
            nothing = sum((value.sum() for value in outputs.values() if value.is_floating_point()), torch.zeros(()))
            self._keep_loss(status, nothing, 0.0, 0.0)
            return 0.0
        with torch.set_grad_enabled(group.training):
            loss, tokens = guarded_loss_value(group.loss_instance, batch.loss_inputs, outputs, arguments)
            if "aux_loss" in outputs:  # of experts; a mean, so multiply by the tokens that divide it later
                loss = loss + outputs["aux_loss"] * max(tokens, 1.0)
        value = float(loss.detach())
        self._keep_loss(status, loss, value, tokens)
        return value

    def backward(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        group = self._group(adapter_name)
        status = group.train_status
        if not group.training or not isinstance(status.loss_value, Tensor):
            raise UserError("backward: there is no loss to go back from; call forward and calculate_loss first")
        self._begin_backward(group, status.loss_value.requires_grad, gradient_accumulation_steps)
        status.loss_value.backward()
        group.after_backward()
        status.outputs = _detached(status.computed("backward")[1])

    def forward_backward(
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
    ) -> dict[str, Any]:
        """Run forward, calculate_loss and backward.

        With ``micro_batch_size``, this many sequences are computed at a time, with the loss and the gradient of the
        whole batch. It needs less memory, and one more forward pass (:mod:`twinkle.model.transformers.micro_batches`).
        """
        group = self._group(adapter_name, activate=True)
        action = read_action(router_replay_action)
        one = self._begin(
            group, inputs, temperature, return_logits, task, kwargs, micro_batch_size, action, training=True
        )
        if len(one.parts) > 1:
            self._in_parts(group, one, kwargs, temperature, gradient_accumulation_steps)
            return dict(group.train_status.computed("forward_backward")[1])
        group.begin(one.status, one.batch, self._passes.outputs(one), kwargs, temperature)
        self.calculate_loss(adapter_name=group.adapter_name)
        self.backward(adapter_name=group.adapter_name, gradient_accumulation_steps=gradient_accumulation_steps)
        return dict(group.train_status.computed("forward_backward")[1])

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
        norm = gradients.clip(self._with_gradient(group), max_grad_norm, norm_type, self._parallel)
        if not math.isfinite(norm):
            self._drop_gradient(group)
            raise NonFiniteError(f"the gradient has norm {norm}: it was dropped, and no step taken")
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
        group.last_lr = tuple(group.lr)
        optimizer.step()

    def zero_grad(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        group = self._group(adapter_name)
        group.set_accumulation(gradient_accumulation_steps)
        if group.at_boundary:
            self._drop_gradient(group)

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
        """Set the optimizer: a name in ``torch.optim``, a plugin id, a class or an instance. The scheduler is removed.

        ``params``: parameters, or groups of them, that are used instead of all trained ones.
        """
        group = self._group(adapter_name)
        if group.adapter_name and not self._adapters.is_trainable(group.adapter_name):
            raise UserError(f"set_optimizer: adapter {group.adapter_name!r} was added with is_trainable=False")
        self._shard()
        if self._in_shards and (isinstance(optimizer_cls, Optimizer) or params is not None):
            raise UnsupportedError("set_optimizer: with shards, give the name or class of an optimizer, and no params")
        parameters = trained_parameters(self.model, group.adapter_name)
        group.optimizer = build_optimizer(optimizer_cls, parameters, lr, weight_decay, params, options)
        # Before the step for samplers of other threads, and after it because these may have seen the count meanwhile.
        group.optimizer.register_step_pre_hook(lambda *_: self._outgoing.changed(group))
        group.optimizer.register_step_post_hook(lambda *_: self._outgoing.changed(group))
        group.lr_scheduler = None
        group.chosen.add("set_optimizer")

    # --- state --------------------------------------------------------------------------------------------------------

    @at_once
    def apply_patch(self, patch_cls: object, *args: Any, **options: Any) -> None:
        """Apply a patch to the attribute ``model``; call it before the first step, because that may shard the model.

        ``patch_cls``: a patch (:class:`twinkle.patch.Patch`), its class or name, or the id of a plugin.
        """
        patch = make_patch(patch_cls)
        if patch.removes_head:
            raise UnsupportedError(f"{type(patch).__name__}: use task='embedding' or task='fused_lm_ce' of forward")
        patch(self.model, *args, **options)

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
        self._state.save(
            group,
            trained_parameters(self.model, group.adapter_name),
            directory,
            save_optimizer=save_optimizer,
            consumed_train_samples=consumed_train_samples,
        )
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
        directory = find_checkpoint(name, output_dir, token)
        self.resume_from_checkpoint(str(directory), resume_only_model=not load_optimizer, adapter_name=adapter_name)

    def resume_from_checkpoint(
        self, checkpoint_dir: str | PathLike[str], *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        group, directory = self._group(adapter_name), Path(checkpoint_dir)
        self._shard()
        parameters = trained_parameters(self.model, group.adapter_name)
        self._outgoing.changed(group)  # before, because an error may leave some of them changed
        return self._state.resume(group, parameters, directory, resume_only_model=resume_only_model)

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Tensor]:
        group = self._group(adapter_name)
        if group.adapter_name:
            return self._adapters.state_dict(group.adapter_name)
        return {name: whole(parameter.detach()) for name, parameter in trained_parameters(self.model, "").items()}

    @at_once
    def get_peft_config_dict(self, *, adapter_name: str | None = None) -> dict[str, Any] | None:
        """Return the config of an adapter, or None for a model without adapters."""
        group = self._group(adapter_name)
        return self._adapters.config(group.adapter_name) if group.adapter_name else None

    @at_once
    def base_model(self) -> BaseModel:
        dtype = torch.bfloat16 if self._half else self._plain.dtype
        return BaseModel(self.model_id, self.tokenizer_id, dtype)

    @at_once
    def offer_weights(self, *, adapter_name: str | None = None, merge_and_sync: bool = True) -> WeightsOffer:
        """Return what :meth:`send_weights` can send: all weights, and an adapter unless it is merged into them.

        A mesh with shards cuts the model into them now: adapters must have been added before.
        """
        group = self._group(adapter_name)
        self._shard()
        return self._outgoing.offer(group.adapter_name, merge=merge_and_sync)

    def offer_base_weights(self) -> WeightsOffer:
        """Return what a sampler of this process that is made for the model begins with: the model without adapters."""
        self._shard()
        return self._outgoing.offer_base(trained="" in self.optimizer_group)

    @gathered
    def send_weights(
        self, adapter_name: str, merged: bool, pieces: Sequence[TensorMeta], *, keep: bool = True
    ) -> Bucket:
        """Return pieces of the weights that :meth:`offer_weights` has offered. All ranks must call this.

        keep: False on a rank whose pieces nobody needs: it takes part, and returns none.
        """
        bucket = self._outgoing.send(adapter_name, merged, pieces)
        return bucket if keep else Bucket((), ())

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        group = self._group(adapter_name)
        parameters = trained_parameters(self.model, group.adapter_name)
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        return describe(group, self.model_id, self.get_peft_config_dict(adapter_name=adapter_name), shapes)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _group(self, adapter_name: str | None, *, activate: bool = False) -> OptimizerGroup:
        name = self.active_group if adapter_name is None else adapter_name
        if name not in self.optimizer_group:
            raise UnknownNameError("adapter", name, self.optimizer_group)
        if activate and name:
            self._adapters.activate(name)
        return self.optimizer_group[name]

    def _add_group(self, group: OptimizerGroup) -> None:
        for status in (group.train_status, group.eval_status):
            status.metrics += [metric(self.device_mesh, self._data_ranks.group) for metric in self._default_metrics]
        self.optimizer_group[group.adapter_name] = group
        self.active_group = group.adapter_name

    def _check_loss(self, loss: Loss) -> None:
        check_no_values(loss)

    def _asked(self, loss: Loss, status: TrainStatus, temperature: float, return_logits: bool, task: str) -> Asked:
        """Check the options of a forward pass, and return what it computes."""
        _check_task(task)
        if not isinstance(temperature, int | float) or temperature <= 0:
            raise InvalidInputError("temperature", temperature, "a number > 0")
        return Asked(
            float(temperature),
            entropies=loss.require_entropy,
            predictions=any(isinstance(metric, Accuracy) for metric in status.metrics),
            logits=return_logits or loss.require_logits,
            embeddings=task == "embedding",
        )

    def _begin(
        self,
        group: OptimizerGroup,
        inputs: object,
        temperature: float,
        return_logits: bool,
        task: str,
        kwargs: dict[str, Any],
        micro_batch_size: int | None,
        action: RouterReplayAction | None,
        *,
        training: bool,
    ) -> Pass:
        """Check the arguments of a forward pass, and prepare it."""
        if action is not None and self._routers is None:
            raise UserError("router_replay_action: construct the model with enable_router_replay=True")
        status = group.train_status if training else group.eval_status
        asked = self._asked(group.loss_instance, status, temperature, return_logits, task)
        asked = replace(asked, records_routes=action is RouterReplayAction.RECORD)
        self._shard()
        status, batch = self._begin_forward(group, inputs, kwargs, training=training, action=action)
        if self._parallel.sequence.size > 1:
            check_same_rows(batch, self._parallel)
        self.model.train(training)
        return Pass(status, batch, asked, split(batch, micro_batch_size, self._ranks))

    def _begin_backward(self, group: OptimizerGroup, trained: bool, gradient_accumulation_steps: int | None) -> None:
        if not trained:
            who = group.adapter_name or "the model"
            raise UserError(f"backward: the loss depends on nothing that is trained; {who!r} is frozen")
        group.set_accumulation(gradient_accumulation_steps)
        if group.normalized:  # all ranks have the same gradient; each adds its own part from now on
            gradients.leave_to_first(self._with_gradient(group), self._parallel)

    def _in_parts(
        self,
        group: OptimizerGroup,
        one: Pass,
        kwargs: dict[str, Any],
        temperature: float,
        gradient_accumulation_steps: int | None,
    ) -> None:
        """Run forward, loss and backward as :mod:`twinkle.model.transformers.micro_batches` describes."""
        outputs, states = self._passes.leaves(one)
        status = one.status
        group.begin(status, one.batch, dict(outputs), kwargs, temperature)
        self.calculate_loss(adapter_name=group.adapter_name)
        loss = status.loss_value
        assert isinstance(loss, Tensor)
        trained = any(parameter.requires_grad for parameter in self._parameters(group))
        self._begin_backward(group, loss.requires_grad and trained, gradient_accumulation_steps)
        self._passes.backward(one, states, loss, outputs)
        group.after_backward()
        status.outputs = _detached(status.computed("forward_backward")[1])

    def _checked(self, batch: SequenceBatch) -> SequenceBatch:
        for number, (routes, length) in enumerate(zip(routes_of(batch), batch.lengths, strict=True)):
            if routes is not None and self._routers is not None:
                check_routes(routes, length, self._routers.spec, f"{ROUTES} of sequence {number}")
        return batch

    def _batch(self, group: OptimizerGroup, inputs: object) -> SequenceBatch:
        batch = super()._batch(group, inputs)
        check_vocabulary(batch, self._vocabulary)
        if self._parallel.sequence.size > 1:
            if batch.images:
                raise UnsupportedError("ulysses_size: sequences with images cannot be divided among ranks; allowed: 1")
            check_lengths(batch.lengths, self._plain)
        return replace(batch, device=self.device)

    def _shard(self) -> None:
        """Cut the model into shards, once, before its first use.

        Parameters are replaced by this, so an optimizer must get them afterwards.
        """
        mesh = self._parallel.shard_mesh
        if mesh is None or self._in_shards:
            return
        layers = self._plain.get_submodule(find_layers(self._plain)).children()
        named = [trained_parameters(self.model, name) for name in self.optimizer_group if name]
        apart = {parameter for parameters in named for parameter in parameters.values()}
        for parameter in apart:
            parameter.data = parameter.data.to(self.device)
        shard_trained(self._forward_pass, layers, mesh, reshard_after_forward=self._reshards, apart=apart)
        self._in_shards = True

    def _normalize(self, group: OptimizerGroup) -> None:
        divisor = group.take_divisor(self._data_ranks)
        if divisor is not None:
            gradients.unite(self._parameters(group), self._parallel)
            for parameter in self._with_gradient(group):
                assert parameter.grad is not None
                parameter.grad.div_(divisor)

    def _with_gradient(self, group: OptimizerGroup) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters(group) if parameter.grad is not None]

    def _parameters(self, group: OptimizerGroup) -> list[nn.Parameter]:
        return list(trained_parameters(self.model, group.adapter_name).values())

    def _drop_gradient(self, group: OptimizerGroup) -> None:
        for parameter in self._with_gradient(group):
            parameter.grad = None
        group.drop_window()


def _check_task(task: str) -> None:
    if task not in _TASKS:
        raise UnknownNameError("task", task, _TASKS)
    if task == "fused_lm_ce":
        raise UnsupportedError("task: 'fused_lm_ce' is not supported; use 'causal_lm'")


def _detached(outputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in outputs.items()}
