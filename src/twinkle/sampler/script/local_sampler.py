"""Sampling in one call, with a model that is trained in this process or with a copy of it, for the cookbook's loops.

Tokens are drawn by :class:`~twinkle.sampler.torch_sampler.sampler.TorchSampler`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinkle.data_format import SampleResponse
from twinkle.errors import InvalidInputError
from twinkle.hub.model_id import id_text
from twinkle.infra import remote_class, remote_function
from twinkle.infra.proxy import RemoteProxy
from twinkle.model.decoder.loading import adopt_model
from twinkle.model.library.components import build_template
from twinkle.model.multi_lora.model import MultiLoraTransformersModel
from twinkle.model.trainer.memory import available_bytes, parameter_bytes
from twinkle.model.trainer.trainer import Trainer
from twinkle.model.transformers.model import TransformersModel
from twinkle.model.weights.buckets import Bucket, TensorMeta, plan_buckets
from twinkle.model.weights.channel import WeightChannel
from twinkle.model.weights.offer import LiveWeights, WeightsOffer, pretrained_id
from twinkle.sampler.script.base_weights import BaseWeights, empty_clone
from twinkle.sampler.script.features import as_sampling_params
from twinkle.sampler.script.in_one_call import (
    AdapterVersions,
    Inputs,
    Params,
    PresentAdapters,
    ReceivesWeights,
    TrainerAdapters,
    own_prompts,
    sample_in_one_call,
)
from twinkle.sampler.script.synchronisation import WeightReceiver
from twinkle.sampler.torch_sampler.sampler import TorchSampler
from twinkle.utils.logger import get_logger

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["LocalSampler", "hand_over"]

_at_once = remote_function(dispatch="all", collect="first", lazy_collect=False)
_BUCKET_BYTES = 64 << 20  # for the weights that a new sampler copies from its model
_FREE_SHARE = 0.3  # share of a GPU's free memory that a sampler beside a TransformersModel takes, if none is given


@remote_class()
class LocalSampler(WeightChannel):
    """A sampler that generates with a base model and with adapters for it.

    model: what to sample from:
    a :class:`MultiLoraTransformersModel` of this process: the sampler runs on its base model and its adapters;
    a :class:`TransformersModel` of this process: the sampler shares its tensors where it can, and copies the others;
    the id of a model, or a model on a worker group: the sampler loads a base model of its own.
    Trained weights come by ``CheckpointEngineManager.sync_weights``, or by :meth:`receive_weights`.
    template: encodes trajectories, and joins prompt and completion; the default is the model's plain template.
    kv_budget_bytes, max_sequences: see :class:`TorchSampler`.
    dtype: that of a base model of its own, "bf16" or "fp32"; None: the model's, or what :class:`Trainer` chooses.
    memory_budget_bytes: the device memory of the sampler with its weights, shared ones included. None: beside a
    :class:`TransformersModel` on a GPU, 30 % of the free memory; otherwise see :class:`Trainer`.
    """

    def __init__(
        self,
        model: MultiLoraTransformersModel | TransformersModel | str | PathLike[str],
        template: "Template | type[Template] | str" = "Template",
        *,
        kv_budget_bytes: int | None = None,
        max_sequences: int | None = None,
        dtype: str | None = None,
        memory_budget_bytes: int | None = None,
    ) -> None:
        # Held by each call that samples or changes weights or caches, because scripts may sample in another thread.
        self._turn = Lock()
        made = _base_for(model, dtype, memory_budget_bytes)
        self._tokenizer_id = made.tokenizer_id
        self._vision = made.trainer.vision
        self.set_template(template)
        self.engine = TorchSampler(
            made.trainer, self.template.tokenizer, kv_budget_bytes=kv_budget_bytes, max_sequences=max_sequences
        )
        present: PresentAdapters = TrainerAdapters(self.engine, made.trainer)
        if made.model is not None:
            present = _PeftAdapters(self.engine, made.model)
        self._versions = AdapterVersions(self.engine, present)
        base = None
        if made.own:
            base = BaseWeights(made.trainer.base, made.trainer.engine.head.spec, made.shared)
        self._base = base
        self.weights_device = made.trainer.device
        self._receiver = WeightReceiver(self.engine, self._versions, base, made.base_id, made.live)

    @_at_once
    def set_template(self, template_cls: "Template | type[Template] | str", **options: Any) -> None:
        """Set the template. A class or a name is instantiated for the model's tokenizer, with these keywords."""
        if isinstance(template_cls, str | type):
            options["model_id"] = self._tokenizer_id
        self.template: Template = build_template(template_cls, options)

    @_at_once
    def receive_weights(self, adapter_name: str, weights: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
        """Sample with these weights for ``adapter_name`` from now on, until this method is called again.

        weights and peft_config are the results of a model's ``get_state_dict`` and ``get_peft_config_dict``. If the
        weights are a remote promise, it is passed to the sampler's workers without being fetched here.
        """

        def install(version: str) -> None:
            self.engine.receive_version(version, peft_config, weights)

        with self._turn:
            self._versions.receive(adapter_name, install)

    @remote_function(dispatch=own_prompts, collect="flatten", lazy_collect=False)
    def sample(
        self,
        inputs: Inputs,
        sampling_params: Params = None,
        adapter_name: str | None = "",
        adapter_path: str | PathLike[str] | None = None,
        *,
        use_base_model: bool = False,
    ) -> list[SampleResponse]:
        """Return one response for each trajectory or feature, with ``num_samples`` sequences each.

        sampling_params: a :class:`SamplingParams`, or its fields as a mapping.
        adapter_name: sample with the weights received for this adapter or, if none were, with its present weights.
        adapter_path: sample with an adapter from a directory in PEFT's format.
        With neither of the two, the adapter that ``sync_weights`` has sent is used, if it sent one by itself; otherwise
        the base model. use_base_model: use no adapter, even if one is named or was sent.

        A ``seed`` belongs to the first input, and each further input uses the next number, so that equal inputs get
        different samples. ``max_tokens=0`` generates nothing and scores the prompt, which is then the whole
        conversation. Log-probabilities are those of the tempered distribution, as a loss with the same ``temperature``
        computes them; those of the prompt are at temperature 1. ``weights_version`` of a response names the weights.
        """
        params = as_sampling_params(sampling_params)
        with self._turn:
            named_one = not use_base_model and (bool(adapter_name) or adapter_path is not None)
            self._receiver.require_usable(with_adapter=named_one)
            if isinstance(inputs, Sequence) and not inputs:  # a worker without inputs: fewer inputs than workers
                return []
            base_name = self._receiver.base_name
            named = self._versions.chosen(
                adapter_name, adapter_path, use_base_model=use_base_model, base_name=base_name
            )
            with named as chosen:
                responses = sample_in_one_call(self.engine, self.template, inputs, params, chosen, self._vision)
            self._receiver.require_usable()  # another thread may have trained the shared weights meanwhile
            return responses

    # --- weight synchronisation: CheckpointEngineManager calls these, in this order -----------------------------------

    @_at_once
    def prepare_weights(self, offer: WeightsOffer) -> tuple[TensorMeta, ...]:
        """Return the tensors of ``offer`` that must be sent. Raise if they do not fit this sampler."""
        with self._turn:
            return self._receiver.prepare(offer)

    @_at_once
    def receive_bucket(self, bucket: Bucket) -> None:
        with self._turn:
            self._receiver.receive(bucket)

    @_at_once
    def finish_weights(self) -> str:
        """Sample with the weights that were sent, and return their name."""
        with self._turn:
            return self._receiver.finish()

    @_at_once
    def abandon_weights(self, why: str, *, finishing: bool = False) -> None:
        """End a synchronisation that failed: keep the old weights, or refuse to sample if they are not whole.

        finishing: whether it failed in :meth:`finish_weights`, here or on another worker.
        """
        with self._turn:
            self._receiver.abandon(why, finishing=finishing)

    @_at_once
    def get_state_keys(self) -> list[str]:
        """Return the names of the base model's weights that :meth:`prepare_weights` knows."""
        return [] if self._base is None else self._base.names

    # --- memory -------------------------------------------------------------------------------------------------------

    @_at_once
    def reset_prefix_cache(self) -> None:
        """Forget the cached beginnings of earlier prompts. Results do not depend on it."""
        with self._turn:
            self.engine.reset_prefix_cache()

    @_at_once
    def reset_encoder_cache(self) -> None:
        """Forget the features of images that the vision tower has seen. Results do not depend on it."""
        with self._turn:
            self.engine.reset_encoder_cache()

    @_at_once
    def reset_mm_cache(self) -> None:
        """Do nothing: prepared images are not kept, only their features are (:meth:`reset_encoder_cache`)."""

    @_at_once
    def sleep(self, level: int = 1) -> None:
        """Free the memory of cached keys and values and, if the sampler has weights of its own, of these.

        level 1: the weights move to host memory (where the device is the CPU, that frees nothing). level 2: they are
        discarded, and after :meth:`wake_up` the sampler needs ``sync_weights``. Weights that are shared with a model
        stay.
        """
        with self._turn:
            self._receiver.sleep(level)

    @_at_once
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back what :meth:`sleep` freed: "weights", "kv_cache", or both (None)."""
        with self._turn:
            self._receiver.wake_up(tags)


@dataclass(frozen=True)
class _Base:
    """A base model for a sampler.

    ``own``: whether its modules are the sampler's alone. ``shared``: the weights that are tensors of the model that
    ``live`` describes. ``model``: that model, if it is a :class:`TransformersModel`.
    """

    trainer: Trainer
    tokenizer_id: str | None
    own: bool
    base_id: str | None
    shared: frozenset[str] = frozenset()
    live: LiveWeights | None = None
    model: TransformersModel | None = None


def _base_for(model: object, dtype: str | None, budget: int | None) -> _Base:
    elsewhere = isinstance(model, RemoteProxy)
    if isinstance(model, str | PathLike):
        trainer = Trainer.from_pretrained(model, dtype=dtype, memory_budget_bytes=budget)
        return _Base(trainer, id_text(model), True, pretrained_id(id_text(model)))
    if not isinstance(model, MultiLoraTransformersModel | TransformersModel):
        allowed = "a TransformersModel, a MultiLoraTransformersModel, or the id of a model, also for one of Megatron"
        raise InvalidInputError("model", model, allowed)
    base = model.base_model()
    if elsewhere:
        trainer = Trainer.from_pretrained(base.model_id, dtype=dtype or base.dtype, memory_budget_bytes=budget)
        return _Base(trainer, base.tokenizer_id, True, pretrained_id(base.model_id))
    if dtype is not None:
        raise InvalidInputError("dtype", dtype, "None for a sampler that uses the weights of a model of this process")
    if isinstance(model, TransformersModel):
        return _beside(model, base.dtype, budget)
    if budget is not None:
        raise InvalidInputError(
            "memory_budget_bytes", budget, "None for a sampler on a MultiLoraTransformersModel, which has a budget"
        )
    return _Base(model.trainer, base.tokenizer_id, False, model.base_id)


def _beside(model: TransformersModel, dtype: torch.dtype, budget: int | None) -> _Base:
    """Make a base model that shares the tensors of a model of this process where it can, and copies the others."""
    offer = model.offer_base_weights()
    live = offer.live
    assert live is not None, "the model is in this process"
    clone, shared = empty_clone(live, dtype, model.device)
    copied = [tensor for tensor in offer.base if tensor.name not in shared]
    if copied:
        size = sum(tensor.count for tensor in copied) * dtype.itemsize / 2**20
        get_logger().info(
            f"LocalSampler: {len(copied)} of {len(offer.base)} weights are copied ({size:.0f} MiB as {dtype}), because "
            "those of the model are sharded or of another dtype"
        )
    parameters = dict(clone.named_parameters())
    for pieces in plan_buckets(copied, _BUCKET_BYTES):
        for piece, numbers in model.send_weights(offer.adapter_name, False, pieces):
            parameters[piece.name].data.view(-1)[piece.start : piece.stop].copy_(numbers)
    if budget is None and model.device.type == "cuda":
        budget = parameter_bytes(clone) + int(_FREE_SHARE * available_bytes(model.device))
    trainer = Trainer(adopt_model(clone), model_id=model.model_id, memory_budget_bytes=budget)
    return _Base(trainer, model.tokenizer_id, True, offer.base_id, frozenset(shared), live if shared else None, model)


class _PeftAdapters:
    """The adapters of a :class:`TransformersModel`, with the weights that they have at the time of a call."""

    def __init__(self, engine: TorchSampler, model: TransformersModel) -> None:
        self._engine = engine
        self._model = model

    def adapter_ids(self) -> list[str]:
        return [name for name in self._model.optimizer_group if name]

    def publish(self, version_id: str, adapter_id: str) -> None:
        config = self._model.get_peft_config_dict(adapter_name=adapter_id)
        assert config is not None
        self._engine.receive_version(version_id, config, self._model.get_state_dict(adapter_name=adapter_id))


def hand_over(model: MultiLoraTransformersModel, sampler: ReceivesWeights, adapter_name: str) -> None:
    """Send the present weights of the model's adapter to the sampler. On Ray they go from worker to worker directly."""
    weights = model.get_state_dict(adapter_name=adapter_name)
    sampler.receive_weights(adapter_name, weights, model.get_peft_config_dict(adapter_name=adapter_name))
