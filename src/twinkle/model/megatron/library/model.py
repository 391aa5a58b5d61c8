"""One model that is cut over processes, trained with adapters or with all its parameters."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twinkle import hub
from twinkle.errors import AdapterExistsError, TwinkleError, UnknownNameError, UnsupportedError, UserError
from twinkle.infra import remote_class
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.adapters.checkpoint import CONFIG, read_json
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.full.trainer import FullTrainer
from twinkle.model.library.optimizer_group import OptimizerGroup
from twinkle.model.library.remote_verbs import at_once, gathered
from twinkle.model.library.training_state import find_checkpoint
from twinkle.model.megatron.full import load_stage, make_full_trainer
from twinkle.model.megatron.library.strategy import MegatronStrategy, ModelOptions
from twinkle.model.megatron.library.verbs import MegatronVerbs, load_base, parameters_of
from twinkle.model.megatron.stage import Stage
from twinkle.model.multi_lora.limits import check_limit, check_name, config_fields, seeded
from twinkle.model.multi_lora.verbs import PreparedPass
from twinkle.model.types import MAX_LOGITS, FullSpec
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.model.weights.offer import WeightsOffer
from twinkle.model.weights.sources import metas, read_bucket
from twinkle.patch.interface import make_patch

__all__ = ["MegatronModel"]


@dataclass(frozen=True)
class TrainedModel:
    """A model all of whose parameters are trained: this process's stage of it, and the trainer."""

    stage: Stage
    trainer: FullTrainer


@remote_class()
class MegatronModel(MegatronVerbs):
    """A model that is cut over processes by tensor, pipeline and expert parallelism, with the library's verbs.

    Without adapters all parameters are one group, named "". A verb without ``adapter_name`` uses ``active_group``, the
    adapter that was added last. ``device_mesh`` may have the sizes dp, tp, pp and ep, and ``sequence_parallel``.
    ``use_distributed_optimizer``: without adapters, data ranks share master weights and optimizer state. ``seed``
    replaces that of ``initialize`` in the seeds of adapters. ``memory_budget_bytes`` and
    ``max_tokens_per_batch`` are options of the :class:`~twinkle.model.Trainer`. Further keywords are fields of
    megatron-core's TransformerConfig; those that ask for another model or another result are refused.
    """

    def __init__(
        self,
        model_id: str | PathLike[str],
        config: object = None,
        ddp_config: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: str | None = None,
        load_weights: bool = True,
        recompute_granularity: str | None = "full",
        recompute_method: str | None = "uniform",
        recompute_num_layers: int | None = 1,
        recompute_modules: list[str] | None = None,
        *,
        tokenizer_id: str | PathLike[str] | None = None,
        device: str | torch.device | None = None,
        seed: int | None = None,
        use_distributed_optimizer: bool = True,
        memory_budget_bytes: int | None = None,
        max_tokens_per_batch: int | None = None,
        max_logits_per_request: int = MAX_LOGITS,
        **transformer_options: Any,
    ) -> None:
        options = ModelOptions(
            model_id,
            config,
            ddp_config,
            MegatronStrategy(device_mesh, mixed_precision, use_distributed_optimizer),
            load_weights,
            tokenizer_id,
            device,
            seed,
            memory_budget_bytes,
            max_tokens_per_batch,
            check_limit("max_logits_per_request", max_logits_per_request),
            (recompute_granularity, recompute_method, recompute_num_layers, recompute_modules),
            transformer_options,
        )
        super().__init__(options, sys.maxsize)
        self._whole: TrainedModel | None = None  # once all parameters are trained
        self._patches: list[Callable[[nn.Module], None]] = []
        self._frozen_adapters: set[str] = set()
        self._origins: dict[str, Path] = {}  # adapters that began with the weights of a directory
        self.active_group = ""
        self.optimizer_group[""] = self._new_group("", {}, 1)

    # --- adapters -----------------------------------------------------------------------------------------------------

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

        seed: that of the initial weights, by default made of the seed of the model or of ``initialize`` and the
        adapter's name, else drawn from torch's generator.
        """
        check_name(adapter_name)
        if adapter_name in self.optimizer_group:
            raise AdapterExistsError(adapter_name)
        whole = self.optimizer_group.get("")
        if whole is not None and whole.chosen:
            raise UserError(
                f"add_adapter_to_model: {', '.join(sorted(whole.chosen))} came before it and was for all parameters, "
                "which an adapter freezes; add adapters first"
            )
        is_directory = isinstance(config_or_dir, str | Path)
        if is_directory:
            directory = find_checkpoint(config_or_dir, None, None)
            config: dict[str, Any] = read_json(directory / CONFIG)
        else:
            config = config_fields("config_or_dir", config_or_dir)
            if config.get("target_modules") is None:
                config["target_modules"] = "all-linear"
        group = self._new_group(adapter_name, config, gradient_accumulation_steps)
        if is_directory:
            self.trainer.create_adapter_from_checkpoint(adapter_name, directory, optimizer=False)
            self._origins[adapter_name] = directory
        else:
            spec = seeded(spec_from_peft(config), adapter_name, seed, self._options.seed)
            self.trainer.create_adapter(adapter_name, spec)
        if not is_trainable:
            self._frozen_adapters.add(adapter_name)
        self.optimizer_group.pop("", None)  # the group of all parameters, which are frozen now
        self.optimizer_group[adapter_name] = group
        self.active_group = adapter_name

    def set_optimizer(
        self,
        optimizer_cls: object = "default",
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        params: object = None,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        group = self._group(adapter_name)
        if group.adapter_name in self._frozen_adapters:
            raise UserError(f"set_optimizer: adapter {group.adapter_name!r} was added with is_trainable=False")
        super().set_optimizer(optimizer_cls, lr, weight_decay, params, adapter_name=group.adapter_name, **options)
        group.chosen.add("set_optimizer")
        self._require_trained(group)

    @at_once
    def apply_patch(self, patch_cls: object, *args: Any, **options: Any) -> None:
        """Apply a patch to each chunk of the attribute ``model``.

        ``patch_cls``: a patch (:class:`twinkle.patch.Patch`), its class or name, or the id of a plugin.
        """
        patch = make_patch(patch_cls)
        if patch.removes_head:
            raise UnsupportedError(f"{type(patch).__name__}: use task='embedding' of forward")

        def apply(chunk: nn.Module) -> None:
            patch(chunk, *args, **options)

        for chunk in self.model:
            apply(chunk)
        self._patches.append(apply)

    def reload_initial_weights(self, *, adapter_name: str | None = None) -> None:
        group = self._group(adapter_name)
        self._require_trained(group)
        if self._whole is not None:
            self._whole.trainer.remove_adapter("")
            self._whole.trainer.create_adapter("", FullSpec())
            group.drop_window()
            return
        origin = self._origins.get(group.adapter_name)
        if origin is None:
            super().reload_initial_weights(adapter_name=group.adapter_name)
            return
        self.trainer.load(group.adapter_name, origin, optimizer=False)
        self.trainer.zero_grad(group.adapter_name)
        group.drop_window()

    # --- passes and state of a model without adapters -----------------------------------------------------------------

    def prepare_forward(
        self, *, adapter_name: str | None = None, training: bool = False, disable_lora: bool = False, **options: Any
    ) -> PreparedPass:
        group = self._group(adapter_name)
        if training:
            self._require_trained(group)
        # A model without adapters that is only asked for scores stays frozen, and takes little memory.
        without = disable_lora or (not group.adapter_name and self._whole is None)
        return super().prepare_forward(
            adapter_name=group.adapter_name, training=training, disable_lora=without, **options
        )

    def prepare_forward_backward(self, *, adapter_name: str | None = None, **options: Any) -> PreparedPass:
        group = self._group(adapter_name)
        self._require_trained(group)
        if group.adapter_name in self._frozen_adapters:
            raise UserError(f"backward: the loss depends on nothing that is trained; {group.adapter_name!r} is frozen")
        return super().prepare_forward_backward(adapter_name=group.adapter_name, **options)

    def save(
        self,
        name: str | None = None,
        output_dir: str | PathLike[str] | None = None,
        interval: int = 1,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        merge_lora: bool = False,
    ) -> str | None:
        group = self._group(adapter_name)
        self._require_trained(group)
        return super().save(
            name,
            output_dir,
            interval,
            adapter_name=group.adapter_name,
            save_optimizer=save_optimizer,
            consumed_train_samples=consumed_train_samples,
            merge_lora=merge_lora,
        )

    def resume_from_checkpoint(
        self, checkpoint_dir: str | PathLike[str], *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        group = self._group(adapter_name)
        self._require_trained(group)
        return super().resume_from_checkpoint(
            checkpoint_dir, resume_only_model=resume_only_model, adapter_name=group.adapter_name
        )

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Tensor]:
        """Return the trained parameters by name. Those of a whole model are on the first process only."""
        group = self._group(adapter_name)
        self._require_trained(group)
        return super().get_state_dict(adapter_name=group.adapter_name)

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        group = self._group(adapter_name)
        self._require_trained(group)
        return super().get_train_configs(adapter_name=group.adapter_name)

    @at_once
    def offer_weights(self, *, adapter_name: str | None = None, merge_and_sync: bool = True) -> WeightsOffer:
        """Return what :meth:`send_weights` can send: all weights, and an adapter unless it is merged into them."""
        if self._whole is None:
            return super().offer_weights(adapter_name=adapter_name, merge_and_sync=merge_and_sync)
        self._group(adapter_name)
        return WeightsOffer("", False, metas(parameters_of(self._whole.stage)), None)

    @gathered
    def send_weights(
        self, adapter_name: str, merged: bool, pieces: Sequence[TensorMeta], *, keep: bool = True
    ) -> Bucket:
        if self._whole is None:
            return super().send_weights(adapter_name, merged, pieces, keep=keep)
        bucket = read_bucket(parameters_of(self._whole.stage), pieces)
        return bucket if keep else Bucket((), ())

    @at_once
    def get_peft_config_dict(self, *, adapter_name: str | None = None) -> dict[str, object] | None:  # type: ignore[override]
        """Return the config of an adapter, or None for a model without adapters."""
        group = self._group(adapter_name)
        return super().get_peft_config_dict(adapter_name=group.adapter_name) if group.adapter_name else None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _group(self, adapter_name: str | None) -> OptimizerGroup:
        name = self.active_group if adapter_name is None else adapter_name
        if name not in self.optimizer_group:
            raise UnknownNameError("adapter", name, self.optimizer_group)
        return self.optimizer_group[name]

    def _sent_name(self, adapter_name: str | None) -> str:
        return self._group(adapter_name).adapter_name

    def _own_stage(self) -> Stage:
        return self.base.stage if self._whole is None else self._whole.stage

    def _require_trained(self, group: OptimizerGroup) -> None:
        """Make sure that a group can be trained. Without adapters all parameters are trained from now on."""
        if not group.adapter_name and self._whole is None:
            self._train_all()

    def _train_all(self) -> None:
        """Load the model again, with fp32 master weights, in the place of the frozen one."""
        self._base = None
        del self._lora_trainer, self._requests, self.state  # they hold the frozen model, whose memory is needed now
        try:
            self._whole = self._load_whole()
        except TwinkleError:
            self._base = load_base(self._options, self.strategy)
            self._use(self._base.trainer)
            raise
        self._use(self._whole.trainer, self._whole.trainer.put_gradient)
        for apply in self._patches:
            apply(self._whole.stage.model)

    def _load_whole(self) -> "TrainedModel":
        options = self._options
        stage = load_stage(hub.resolve(options.model_id), *options.place(self.strategy), images=True)
        trainer = make_full_trainer(
            stage,
            options.model_id,
            tokenizer_id=options.tokenizer_id,
            memory_budget_bytes=options.memory_budget_bytes,
            max_tokens_per_batch=options.max_tokens_per_batch,
            share_optimizer=self.strategy.use_distributed_optimizer,
        )
        trainer.create_adapter("", FullSpec())
        return TrainedModel(stage, trainer)
