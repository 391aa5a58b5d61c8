"""Many LoRA adapters on one frozen model that is cut over processes."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from twinkle.infra import remote_class
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.library.remote_verbs import at_once
from twinkle.model.megatron.library.strategy import MegatronStrategy, ModelOptions
from twinkle.model.megatron.library.verbs import MegatronVerbs
from twinkle.model.multi_lora.limits import AdapterLimits, check_limit, seeded
from twinkle.model.types import MAX_LOGITS

__all__ = ["MultiLoraMegatronModel"]


@remote_class()
class MultiLoraMegatronModel(MegatronVerbs):
    """Many LoRA adapters on one frozen model. Verbs of an adapter need ``adapter_name``; no adapter affects another.

    ``device_mesh`` may have the sizes dp, tp, pp and ep, and ``sequence_parallel``. ``max_loras``, ``max_r`` and
    ``max_length`` limit the number of adapters, their rank and the tokens of a sequence. An adapter whose config names
    no target modules gets ``target_modules``. ``lora_config``, where given, sets ``max_r`` and ``target_modules``.
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
        max_loras: int = 5,
        max_r: int = 32,
        max_length: int = 8192,
        target_modules: str | list[str] = "all-linear",
        *,
        lora_config: Any = None,
        tokenizer_id: str | PathLike[str] | None = None,
        device: str | torch.device | None = None,
        seed: int | None = None,
        use_distributed_optimizer: bool = True,
        memory_budget_bytes: int | None = None,
        max_tokens_per_batch: int | None = None,
        max_logits_per_request: int = MAX_LOGITS,
        **transformer_options: Any,
    ) -> None:
        self._limits = AdapterLimits.read(lora_config, max_loras, max_r, target_modules)
        self.max_loras, self.max_r = self._limits.max_loras, self._limits.max_r
        self.target_modules = self._limits.target_modules
        self.max_length = check_limit("max_length", max_length)
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
        super().__init__(options, max_length)

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int = 1, seed: int | None = None
    ) -> None:
        """Add a new adapter.

        ``config_or_dir``: PEFT's LoraConfig, or its contents as a mapping. ``seed``: that of the initial weights, by
        default made of the seed of the model or of ``initialize`` and the adapter's name, else drawn from torch's
        generator.
        """
        present = self.optimizer_group
        config, spec = self._limits.adapter(adapter_name, config_or_dir, present, self.trainer.architecture)
        group = self._new_group(adapter_name, config, gradient_accumulation_steps)
        self.trainer.create_adapter(adapter_name, seeded(spec, adapter_name, seed, self._options.seed))
        self.optimizer_group[adapter_name] = group

    @at_once
    def remove_adapter(self, adapter_name: str) -> None:
        self._group(adapter_name)
        self.trainer.remove_adapter(adapter_name)
        del self.optimizer_group[adapter_name]
