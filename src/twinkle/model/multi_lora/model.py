"""Many LoRA adapters on one frozen model: the library's verbs, with a Trainer in each process."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any
from uuid import uuid4

import torch

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.infra import remote_class
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.library.parallel_options import check_parallel_options, choose_precision, read_load_options
from twinkle.model.library.remote_verbs import at_once, gathered
from twinkle.model.multi_lora.limits import AdapterLimits, check_limit, seeded
from twinkle.model.multi_lora.outgoing import adapter_sources, base_sources
from twinkle.model.multi_lora.verbs import LoraVerbs
from twinkle.model.parallel import own_device
from twinkle.model.trainer.trainer import Trainer
from twinkle.model.types import MAX_LOGITS
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.model.weights.channel import WeightChannel
from twinkle.model.weights.offer import BaseModel, LiveWeights, WeightsOffer, pretrained_id
from twinkle.model.weights.sources import metas, read_bucket


@remote_class()
class MultiLoraTransformersModel(LoraVerbs, WeightChannel):
    """Many LoRA adapters on one frozen model. Verbs of an adapter need ``adapter_name``; no adapter affects another.

    ``max_loras``, ``max_r`` and ``max_length`` limit the number of adapters, their rank and the tokens of a sequence.
    An adapter whose config names no target modules gets ``target_modules``. ``lora_config``, where given, sets
    ``max_r`` and ``target_modules``. ``memory_budget_bytes``, ``max_tokens_per_batch`` and ``compiled`` are options of
    the :class:`Trainer`. ``max_logits_per_request`` limits the logits that ``return_logits`` and losses
    on logits compute. Further keywords are those of ``from_pretrained`` that :func:`read_load_options` knows.
    """

    def __init__(
        self,
        model_cls: object = None,
        model_id: str | PathLike[str] | None = None,
        config: object = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: str | None = None,
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
        tokenizer_id: str | PathLike[str] | None = None,
        device: str | torch.device | None = None,
        memory_budget_bytes: int | None = None,
        max_tokens_per_batch: int | None = None,
        compiled: bool = False,
        max_logits_per_request: int = MAX_LOGITS,
        enable_router_replay: bool = False,
        **load_options: Any,
    ) -> None:
        mixed_precision = read_load_options(load_options, mixed_precision)
        reshards = check_parallel_options(
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
        self._limits = AdapterLimits.read(lora_config, max_loras, max_r, target_modules)
        self.max_loras, self.max_r = self._limits.max_loras, self._limits.max_r
        self.target_modules = self._limits.target_modules
        self.max_length = check_limit("max_length", max_length)
        self.trainer = Trainer.from_pretrained(
            model_id,
            device=device,
            dtype=choose_precision(mixed_precision, own_device(device, device_mesh)),
            memory_budget_bytes=memory_budget_bytes,
            max_tokens_per_batch=max_tokens_per_batch,
            compiled=compiled,
            device_mesh=device_mesh,
            reshard_after_forward=reshards,
        )
        if enable_router_replay and self.trainer.architecture.routing is None:
            raise UnsupportedError(
                f"enable_router_replay: {model_id} has no routers to experts whose choice can be recorded"
            )
        self.weights_device = self.trainer.device
        super().__init__(
            self.trainer,
            model_id,
            tokenizer_id or model_id,
            max_length,
            process_state=True,
            device_mesh=device_mesh,
            ranks=self.trainer.ranks,
            max_logits=check_limit("max_logits_per_request", max_logits_per_request),
            vision=self.trainer.vision,
        )
        self.base_id = pretrained_id(self.model_id) or uuid4().hex

    # --- adapters -----------------------------------------------------------------------------------------------------

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int = 1, seed: int | None = None
    ) -> None:
        """Add a new adapter.

        ``config_or_dir``: PEFT's LoraConfig, or its contents as a mapping. ``seed``: that of the initial weights, by
        default made of the seed of ``initialize`` and the adapter's name, else drawn from torch's generator.
        """
        present = self.optimizer_group
        config, spec = self._limits.adapter(adapter_name, config_or_dir, present, self.trainer.architecture)
        group = self._new_group(adapter_name, config, gradient_accumulation_steps)
        self.trainer.create_adapter(adapter_name, seeded(spec, adapter_name, seed))
        self.optimizer_group[adapter_name] = group

    @at_once
    def remove_adapter(self, adapter_name: str) -> None:
        self._group(adapter_name)
        self.trainer.remove_adapter(adapter_name)
        del self.optimizer_group[adapter_name]

    @at_once
    def base_model(self) -> BaseModel:
        return BaseModel(self.model_id, self.tokenizer_id, self.trainer.dtype)

    # --- weight synchronisation ---------------------------------------------------------------------------------------

    @at_once
    def offer_weights(self, *, adapter_name: str | None = None, merge_and_sync: bool = True) -> WeightsOffer:
        """Return what :meth:`send_weights` can send: the base model and the adapter, or both merged.

        ``adapter_name`` may be left out if there is only one adapter.
        """
        if adapter_name is None and len(self.optimizer_group) == 1:
            adapter_name = next(iter(self.optimizer_group))
        name = self._group(adapter_name).adapter_name
        live = LiveWeights(self, self.trainer.base, {}, lambda: 0)
        if merge_and_sync:
            return WeightsOffer(name, True, metas(base_sources(self.trainer, name)), None, live=live)
        return WeightsOffer(
            name,
            False,
            metas(base_sources(self.trainer, None)),
            self.base_id,
            metas(adapter_sources(self.trainer, name)),
            self.trainer.peft_config(name),
            live,
        )

    @gathered
    def send_weights(
        self, adapter_name: str, merged: bool, pieces: Sequence[TensorMeta], *, keep: bool = True
    ) -> Bucket:
        """Return pieces of the weights that :meth:`offer_weights` has offered. All ranks must call this.

        keep: False on a rank whose pieces nobody needs: it takes part, and returns none.
        """
        sources = base_sources(self.trainer, adapter_name if merged else None)
        bucket = read_bucket(sources | adapter_sources(self.trainer, adapter_name), pieces)
        return bucket if keep else Bucket((), ())
