"""Many LoRA adapters on one frozen model, through the verbs of the library: a thin layer over the Trainer.

``forward`` keeps its inputs, not a graph: ``backward`` computes them again, together with the gradient, so that any
number of adapters may be between the two. ``forward_backward`` computes once.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import CapacityError, InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.loss import Loss
from twinkle.metric import LossMetric, TrainMetric
from twinkle.model.checkpoint_source import copy_tokenizer, find_checkpoint
from twinkle.model.components import loss_value
from twinkle.model.interface import TwinkleModel
from twinkle.model.library_objective import refuse_unless_logps
from twinkle.model.lora_optimizer import adam_params, build_lora_optimizer
from twinkle.model.lora_requests import LoraRequests
from twinkle.model.optimizer_group import OptimizerGroup, check_clipping
from twinkle.model.parameter_groups import apply_optim_params
from twinkle.model.peft_config import spec_from_peft
from twinkle.model.single_process import Mesh, check_precision, check_single_process
from twinkle.model.train_configs import describe
from twinkle.model.trainer import Trainer
from twinkle.model.training_state import (
    check_resumable,
    checkpoint_path,
    is_due,
    load_state,
    progress,
    read_progress,
    save_state,
    summary,
)

_WINDOW_GRADIENT = "gradient"


class MultiLoraTransformersModel(TwinkleModel):
    """``adapter_name`` is given to every verb; adapters never meet.

    max_loras, max_r and max_length are limits on adapters, on their rank and on the tokens of a sequence. An adapter
    whose config names no target modules gets ``target_modules``. ``lora_config``, where given, sets max_r and
    target_modules. Memory is divided as the :class:`Trainer` does it, and its last three options are the Trainer's.
    """

    def __init__(
        self,
        model_cls: object = None,
        model_id: str | None = None,
        config: object = None,
        device_mesh: Mesh | None = None,
        mixed_precision: str = "bf16",
        strategy: str = "accelerate",
        ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None,
        lora_config: Any = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        max_loras: int = 5,
        max_r: int = 32,
        max_length: int = 8192,
        target_modules: str | list[str] = "all-linear",
        *,
        tokenizer_id: str | None = None,
        device: str | torch.device | None = None,
        memory_budget_bytes: int | None = None,
        max_tokens_per_batch: int | None = None,
        compiled: bool = False,
    ) -> None:
        check_single_process(
            device_mesh=device_mesh,
            strategy=strategy,
            ddp_config=ddp_config,
            fsdp_config=fsdp_config,
            grad_scaler_config=grad_scaler_config,
            memory_efficient_init=memory_efficient_init,
        )
        if model_id is None:
            raise InvalidInputError("model_id", None, "the id of a model or a local directory")
        if model_cls is not None or config is not None:
            raise UnsupportedError("model_cls, config: a multi-LoRA model is loaded as its own configuration says")
        shared = {} if lora_config is None else _fields("lora_config", lora_config)
        super().__init__(model_id, tokenizer_id or model_id)
        self.device_mesh = device_mesh
        self.max_loras = _limit("max_loras", max_loras)
        self.max_r = _limit("max_r", shared.get("r", max_r))
        self.max_length = _limit("max_length", max_length)
        self.target_modules = shared.get("target_modules") or target_modules
        self.trainer = Trainer.from_pretrained(
            model_id,
            device=device,
            dtype=check_precision(mixed_precision),
            memory_budget_bytes=memory_budget_bytes,
            max_tokens_per_batch=max_tokens_per_batch,
            compiled=compiled,
        )
        self._requests = LoraRequests(self.trainer, max_length)

    # --- adapters -----------------------------------------------------------------------------------------------------

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int = 1
    ) -> None:
        """``config_or_dir``: PEFT's LoraConfig, or its contents as a mapping."""
        if not isinstance(adapter_name, str) or not adapter_name:
            raise InvalidInputError("adapter_name", adapter_name, "a name")
        if isinstance(config_or_dir, str | Path):
            raise InvalidInputError("config_or_dir", config_or_dir, "a LoraConfig; load() then reads a directory")
        if len(self.optimizer_group) >= self.max_loras and adapter_name not in self.optimizer_group:
            raise CapacityError(f"max_loras: {self.max_loras} adapters exist; remove one, or construct with more")
        config = _fields("config_or_dir", config_or_dir)
        if config.get("target_modules") is None:
            config["target_modules"] = self.target_modules
        rank = config.get("r", 8)
        if isinstance(rank, int) and rank > self.max_r:
            raise InvalidInputError("r", rank, f"at most {self.max_r}; construct the model with a larger max_r")
        group = OptimizerGroup(adapter_name, config, gradient_accumulation_steps)
        # From torch's generator: a program that seeds it gets the same adapter every time.
        seed = int(torch.randint(2**62, ()))
        self.trainer.create_adapter(adapter_name, replace(spec_from_peft(config), seed=seed))
        # Accuracy is not among the defaults: it needs the likeliest token of every row, and with it CUDA's slower head.
        group.train_status.metrics += [LossMetric(self.device_mesh), TrainMetric(self.device_mesh)]
        group.eval_status.metrics += [LossMetric(self.device_mesh), TrainMetric(self.device_mesh)]
        self.optimizer_group[adapter_name] = group

    def remove_adapter(self, adapter_name: str) -> None:
        self._group(adapter_name)
        self.trainer.remove_adapter(adapter_name)
        del self.optimizer_group[adapter_name]

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
        _check_asked(return_logits, task)
        group = self._group(adapter_name)
        status, batch = self._begin_forward(group, inputs, kwargs, training=True)
        outputs = self._requests.forward(group, status, batch, temperature, base_model=False)
        status.begin(batch, outputs, kwargs, temperature)
        return outputs

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
        _check_asked(return_logits, task)
        group = self._group(adapter_name)
        status, batch = self._begin_forward(group, inputs, kwargs, training=False)
        outputs = self._requests.forward(group, status, batch, temperature, base_model=disable_lora)
        status.begin(batch, outputs, kwargs, temperature)
        return outputs

    def calculate_loss(self, *, adapter_name: str | None = None, **kwargs: Any) -> float:
        group = self._group(adapter_name)
        status = group.status
        batch, outputs = status.computed("calculate_loss")
        arguments = self._loss_arguments(group, kwargs)
        with torch.no_grad():
            loss, tokens = loss_value(group.loss_instance, batch.loss_inputs, outputs, arguments)
        value = float(loss)
        status.has_loss(value, value, tokens)
        return value

    def backward(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        group = self._group(adapter_name)
        status = group.train_status
        batch, _ = status.computed("backward")
        if not group.training or status.loss_value is None:
            raise UserError("backward: there is no loss to go back from; call forward and calculate_loss first")
        group.set_accumulation(gradient_accumulation_steps)
        self._requests.train(group, batch, status.temperature, status.forward_kwargs)
        group.after_backward()

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
        _check_asked(return_logits, task)
        group = self._group(adapter_name)
        group.set_accumulation(gradient_accumulation_steps)
        status, batch = self._begin_forward(group, inputs, kwargs, training=True)
        trained = self._requests.train(group, batch, temperature, kwargs)
        status.begin(batch, trained.outputs, kwargs, temperature)
        status.has_loss(trained.loss, trained.loss, trained.num_tokens)
        group.after_backward()
        return trained.outputs

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
        norm = self.trainer.gradient_norm(group.adapter_name, float(norm_type))
        if norm > max_grad_norm:  # as torch.nn.utils.clip_grad_norm_ does it
            self.trainer.scale_gradient(group.adapter_name, min(1.0, max_grad_norm / (norm + 1e-6)))
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
        params, decoupled = adam_params(optimizer)
        self.trainer.optim_step(group.adapter_name, params, decoupled=decoupled)
        optimizer.step()  # moves nothing; schedulers want to see it before they go on
        group.last_lr = (params.learning_rate,)
        group.drop_window()

    def zero_grad(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        group = self._group(adapter_name)
        group.set_accumulation(gradient_accumulation_steps)
        if group.at_boundary:
            self.trainer.zero_grad(group.adapter_name)
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
        output_dir: str | None = None,
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

        def companions(staging: Path) -> None:
            if self.tokenizer_id is not None:
                copy_tokenizer(self.tokenizer_id, staging)
            if save_optimizer:
                gradient = self.trainer.snapshot(group.adapter_name).gradient
                window = {} if gradient is None else {_WINDOW_GRADIENT: torch.from_numpy(gradient)}
                save_state(staging, group, window)

        state = progress(group, consumed_train_samples) if save_optimizer else {}
        self.trainer.save(
            group.adapter_name, directory, optimizer=save_optimizer, overwrite=True, state=state, companions=companions
        )
        return str(directory)

    def load(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        load_optimizer: bool = False,
        token: str | None = None,
    ) -> None:
        """With ``load_optimizer`` it is :meth:`resume_from_checkpoint`."""
        directory = find_checkpoint(name, output_dir, token)
        self.resume_from_checkpoint(str(directory), resume_only_model=not load_optimizer, adapter_name=adapter_name)

    def resume_from_checkpoint(
        self, checkpoint_dir: str, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        group, directory = self._group(adapter_name), Path(checkpoint_dir)
        if resume_only_model:
            self.trainer.load(group.adapter_name, directory, optimizer=False)
            group.drop_window()
            return summary(read_progress(directory, missing_ok=True))
        check_resumable(directory, group)
        self.trainer.load(group.adapter_name, directory, optimizer=True)
        state, window = load_state(directory, group)
        if _WINDOW_GRADIENT in window:
            snapshot = self.trainer.snapshot(group.adapter_name)
            self.trainer.restore(group.adapter_name, replace(snapshot, gradient=window[_WINDOW_GRADIENT].numpy()))
        return summary(state)

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Tensor]:
        weights = self.trainer.weights(self._group(adapter_name).adapter_name)
        return {name: torch.from_numpy(array) for name, array in weights.items()}

    def get_peft_config_dict(self, *, adapter_name: str | None = None) -> dict[str, object]:
        """The contents of its adapter_config.json."""
        return self.trainer.peft_config(self._group(adapter_name).adapter_name)

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        group = self._group(adapter_name)
        shapes = {name: tuple(tensor.shape) for name, tensor in self.get_state_dict(adapter_name=adapter_name).items()}
        return describe(group, self.model_id, self.get_peft_config_dict(adapter_name=adapter_name), shapes)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _group(self, adapter_name: str | None) -> OptimizerGroup:
        if adapter_name is None:
            known = ", ".join(self.optimizer_group) or "none yet: call add_adapter_to_model"
            raise InvalidInputError("adapter_name", None, f"the name of an adapter ({known})")
        if adapter_name not in self.optimizer_group:
            raise UnknownNameError("adapter", adapter_name, self.optimizer_group or ("none",))
        return self.optimizer_group[adapter_name]

    def _check_loss(self, loss: Loss) -> None:
        refuse_unless_logps(loss)

    def _normalize(self, group: OptimizerGroup) -> None:
        divisor = group.take_divisor()
        if divisor is not None:
            self.trainer.scale_gradient(group.adapter_name, 1.0 / divisor)


def _limit(field: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(field, value, "an integer ≥ 1")
    return value


def _fields(field: str, config: Any) -> dict[str, Any]:
    """Those of PEFT's LoraConfig, which is not imported, or of a mapping like it."""
    if isinstance(config, Mapping):
        return dict(config)
    if not is_dataclass(config) or isinstance(config, type):
        raise InvalidInputError(field, config, "a LoraConfig, or its fields as a mapping")
    fields: dict[str, Any] = config.to_dict()  # type: ignore[attr-defined]
    return fields


def _check_asked(return_logits: bool, task: str) -> None:
    if return_logits:
        raise UnsupportedError("return_logits: a multi-LoRA model never holds all logits; use TransformersModel")
    if task != "causal_lm":
        raise UnsupportedError(f"task: got {task!r}, a multi-LoRA model does 'causal_lm'; use TransformersModel")
