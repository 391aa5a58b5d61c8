"""One model that is cut over processes, trained with adapters or with all its parameters."""

import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import AdapterExistsError, UnknownNameError, UnsupportedError, UserError
from twinkle.infra import remote_class
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.adapters.checkpoint import CONFIG, read_json
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.library.optimizer_group import OptimizerGroup
from twinkle.model.library.remote_verbs import at_once
from twinkle.model.library.training_state import find_checkpoint
from twinkle.model.megatron.library.strategy import MegatronStrategy, ModelOptions
from twinkle.model.megatron.library.verbs import MegatronVerbs
from twinkle.model.multi_lora.limits import check_limit, check_name, config_fields, seeded
from twinkle.model.multi_lora.verbs import PreparedPass
from twinkle.model.types import MAX_LOGITS
from twinkle.patch.interface import make_patch

__all__ = ["MegatronModel"]


@remote_class()
class MegatronModel(MegatronVerbs):
    """A model that is cut over processes by tensor, pipeline and expert parallelism, with the library's verbs.

    Without adapters all parameters are one group, named "". A verb without ``adapter_name`` uses ``active_group``, the
    adapter that was added last. ``device_mesh`` may have the sizes dp, tp, pp and ep, and ``sequence_parallel``.
    ``seed`` replaces that of ``initialize`` in the seeds of adapters. ``memory_budget_bytes`` and
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

    @at_once
    def apply_patch(self, patch_cls: object, *args: Any, **options: Any) -> None:
        """Apply a patch to each chunk of the attribute ``model``.

        ``patch_cls``: a patch (:class:`twinkle.patch.Patch`), its class or name, or the id of a plugin.
        """
        patch = make_patch(patch_cls)
        if patch.removes_head:
            raise UnsupportedError(f"{type(patch).__name__}: use task='embedding' of forward")
        for chunk in self.model:
            patch(chunk, *args, **options)

    def reload_initial_weights(self, *, adapter_name: str | None = None) -> None:
        group = self._group(adapter_name)
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
            self._require_trained(group, "forward")
        # Without adapters the frozen base computes what a model of all parameters would.
        without = disable_lora or not group.adapter_name
        return super().prepare_forward(
            adapter_name=group.adapter_name, training=training, disable_lora=without, **options
        )

    def prepare_forward_backward(self, *, adapter_name: str | None = None, **options: Any) -> PreparedPass:
        group = self._group(adapter_name)
        self._require_trained(group, "forward_backward")
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
        self._require_trained(group, "save")
        return super().save(
            name,
            output_dir,
            interval,
            adapter_name=group.adapter_name,
            save_optimizer=save_optimizer,
            consumed_train_samples=consumed_train_samples,
            merge_lora=merge_lora,
        )

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Tensor]:
        group = self._group(adapter_name)
        self._require_trained(group, "get_state_dict")
        return super().get_state_dict(adapter_name=group.adapter_name)

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

    def _require_trained(self, group: OptimizerGroup, verb: str) -> None:
        """Make sure that this group can be trained."""
        if not group.adapter_name:
            raise UnsupportedError(
                f"{verb}: a MegatronModel without adapters cannot be trained yet; call add_adapter_to_model first"
            )
