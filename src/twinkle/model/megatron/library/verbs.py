"""The verbs that both Megatron models have: those of adapters, and reading the weights of a model that is cut.

All processes of a model's mesh call the same verbs. Processes that hold cuts of one replica get the same rows.
"""

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor, nn

from twinkle import hub
from twinkle.errors import InvalidInputError, UnsupportedError, UserError
from twinkle.model.library.components import build_scheduler
from twinkle.model.library.optimizer_group import OptimizerGroup
from twinkle.model.library.remote_verbs import at_once, gathered
from twinkle.model.library.sequences import PLACED, SequenceBatch
from twinkle.model.library.training_state import checkpoint_path, copy_tokenizer, is_due
from twinkle.model.megatron.gathering import CutWeight, ModelFolder, cut_weights, whole_tensors
from twinkle.model.megatron.library.optimizer import (
    OptimizerParamScheduler,
    is_megatron_optimizer,
    is_megatron_scheduler,
    optimizer_options,
)
from twinkle.model.megatron.library.strategy import MegatronStrategy, ModelOptions
from twinkle.model.megatron.stage import Stage, build_stage
from twinkle.model.megatron.trainer import make_trainer
from twinkle.model.megatron.weights import CheckpointFiles
from twinkle.model.multi_lora.outgoing import adapter_sources, merge_adapter
from twinkle.model.multi_lora.verbs import LoraVerbs, PreparedPass
from twinkle.model.trainer.trainer import Trainer
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.model.weights.channel import WeightChannel
from twinkle.model.weights.offer import BaseModel, WeightsOffer, pretrained_id
from twinkle.model.weights.sources import ReadableWeight, metas, read_bucket

__all__ = ["MegatronVerbs"]


@dataclass(frozen=True)
class FrozenBase:
    """A base model that is not trained: this process's stage of it, and the trainer of the adapters on it."""

    stage: Stage
    trainer: Trainer

    @functools.cached_property
    def parameters(self) -> dict[str, CutWeight]:
        """Return the weights by the names of Transformers' parameters. All processes must call this."""
        return parameters_of(self.stage)

    def merged(self, weights: Mapping[str, CutWeight], adapter_name: str, asked: str) -> dict[str, CutWeight]:
        """Return weights with an adapter merged into what is read of them. ``asked``: the option, for errors."""
        tied = bool(self.stage.hf_config.tie_word_embeddings)
        return merge_adapter(weights, self.trainer, adapter_name, tied=tied, asked=asked)


def parameters_of(stage: Stage) -> dict[str, CutWeight]:
    """Return the weights of a stage's model by the names of Transformers' parameters. All processes must call this."""
    return cut_weights(stage.pieces(fused_experts=True), stage.mesh.world)


def load_base(options: ModelOptions, strategy: MegatronStrategy) -> FrozenBase:
    """Load this process's cut of a model that is not trained. All processes call this."""
    stage = build_stage(hub.resolve(options.model_id), *options.place(strategy))
    trainer = make_trainer(
        stage,
        options.model_id,
        memory_budget_bytes=options.memory_budget_bytes,
        max_tokens_per_batch=options.max_tokens_per_batch,
    )
    return FrozenBase(stage, trainer)


class MegatronVerbs(LoraVerbs, WeightChannel):
    """Adapters on a frozen model that is cut over the processes of a mesh."""

    def __init__(self, options: ModelOptions, max_length: int) -> None:
        self.strategy = options.checked_strategy()
        self._options = options
        base = load_base(options, self.strategy)
        stage, trainer = base.stage, base.trainer
        self._base: FrozenBase | None = base
        self.hf_config = stage.hf_config
        self.weights_device = stage.device
        super().__init__(
            trainer,
            options.model_id,
            options.tokenizer_id or options.model_id,
            max_length,
            process_state=True,
            device_mesh=self.strategy.device_mesh,
            ranks=trainer.ranks,
            data_ranks=trainer.data_ranks,
            max_logits=options.max_logits,
        )
        self._base_id = pretrained_id(self.model_id) or uuid4().hex

    def _batch(self, group: OptimizerGroup, inputs: object) -> SequenceBatch:
        rows = inputs if isinstance(inputs, Sequence) else [inputs]
        for number, row in enumerate(rows):
            if isinstance(row, Mapping) and any(row.get(name) is not None for name in ("pixel_values", PLACED)):
                raise UnsupportedError(
                    f"inputs[{number}].pixel_values: the Megatron backend reads text only; images need a "
                    "TransformersModel or a MultiLoraTransformersModel"
                )
        return super()._batch(group, inputs)

    @property
    def base(self) -> FrozenBase:
        """Return the base model of the adapters. A model that is trained itself has none."""
        if self._base is None:
            raise UserError("all parameters of this model are trained; it has no frozen base for adapters")
        return self._base

    @property
    def trainer(self) -> Trainer:
        return self.base.trainer

    @property
    def model(self) -> list[nn.Module]:
        """Return the chunks of the model that this process runs: one, a pipeline stage."""
        return [self._own_stage().model]

    # --- training -----------------------------------------------------------------------------------------------------

    def prepare_forward_backward(self, *, disable_lora: bool = False, **options: Any) -> PreparedPass:
        if disable_lora is not False:
            raise UnsupportedError("disable_lora: got True, allowed: False; without its adapter nothing is trained")
        return super().prepare_forward_backward(**options)

    def forward_only(
        self, *, adapter_name: str | None = None, task: str = "causal_lm", **options: Any
    ) -> dict[str, Any]:
        """Compute the outputs, and the loss too if it reads no more than the call gives, as Megatron does.

        So calculate_metric(is_training=False) reports a loss without calculate_loss. A loss that reads arguments, such
        as DPO's, is computed if one of them is given. All ranks decide alike, because the call is the same on all.
        """
        outputs = super().forward_only(adapter_name=adapter_name, task=task, **options)
        group = self._group(adapter_name)
        loss = group.loss_instance
        has_arguments = not loss.call_arguments or not options.keys().isdisjoint(loss.call_arguments)
        if task == "embedding" or loss.require_embeddings or not has_arguments:
            return outputs
        self.calculate_loss(adapter_name=adapter_name)
        _, kept = group.status.computed("forward_only")
        return {**outputs, "loss": kept["loss"], "num_tokens": kept["num_tokens"]}

    def lr_step(
        self,
        increment: int = 1,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> None:
        """Advance the scheduler by ``increment`` steps, if there is one; do nothing inside a window."""
        if not isinstance(increment, int) or isinstance(increment, bool) or increment < 0:
            raise InvalidInputError("increment", increment, "an integer ≥ 0")
        for _ in range(increment):
            super().lr_step(adapter_name=adapter_name, gradient_accumulation_steps=gradient_accumulation_steps)

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
        """Set the optimizer: "default", "Adam", "MegatronDistributedOptimizer", or a name or class of ``torch.optim``.

        The first three are Megatron's Adam, with decoupled weight decay, and take fields of its OptimizerConfig.
        """
        if is_megatron_optimizer(optimizer_cls):
            optimizer_cls, options = optimizer_options(options)
        super().set_optimizer(optimizer_cls, lr, weight_decay, params, adapter_name=adapter_name, **options)

    def set_lr_scheduler(
        self, scheduler_cls: object = "default", *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Set the scheduler: "default" or "OptimizerParamScheduler", Megatron's, or what other models take."""
        if not is_megatron_scheduler(scheduler_cls):
            super().set_lr_scheduler(scheduler_cls, adapter_name=adapter_name, **options)
            return
        group = self._group(adapter_name)
        optimizer = group.required_optimizer("set_lr_scheduler")
        if "lr_decay_steps" not in options:
            raise InvalidInputError("lr_decay_steps", None, "the number of steps until the rate is min_lr")
        group.lr_scheduler = build_scheduler(OptimizerParamScheduler, optimizer, options)

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
        merge_lora: bool = False,
    ) -> str | None:
        """Write a checkpoint and return its directory; return None if cur_step is no multiple of ``interval``.

        merge_lora: write a Hugging Face folder of the whole model with the adapter merged into its weights.
        """
        group = self._group(adapter_name)
        if not merge_lora or not group.adapter_name:
            return super().save(
                name,
                output_dir,
                interval,
                adapter_name=adapter_name,
                save_optimizer=save_optimizer,
                consumed_train_samples=consumed_train_samples,
            )
        if save_optimizer:
            raise UnsupportedError(
                "merge_lora: a merged folder has no adapter to go on with; save_optimizer=True needs merge_lora=False"
            )
        if not is_due(group, interval):
            return None
        directory = checkpoint_path(group, name, output_dir)
        weights = self.base.merged(self._weights_of_files(), group.adapter_name, "merge_lora")
        _model_folder(self.base.stage, hub.resolve(self.model_id).path).save(
            directory, weights, self._ranks, self._copy_tokenizer
        )
        return str(directory)

    @at_once
    def reload_initial_weights(self, *, adapter_name: str | None = None) -> None:
        """Put an adapter back to the weights that it began with; the optimizer's state starts anew."""
        group = self._group(adapter_name)
        spec = self.trainer.spec(group.adapter_name)
        self.trainer.remove_adapter(group.adapter_name)
        self.trainer.create_adapter(group.adapter_name, spec)
        group.drop_window()

    def get_hf_state_dict(self, adapter_name: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the weights one by one: by default those of the base model, by the names of its checkpoint.

        With an ``adapter_name`` they are the adapter's, by PEFT's names. All processes must go through all of them.
        """
        if adapter_name:
            yield from self.get_state_dict(adapter_name=adapter_name).items()
        else:
            yield from whole_tensors(self._weights_of_files())

    @at_once
    def base_model(self) -> BaseModel:
        return BaseModel(self.model_id, self.tokenizer_id, self._own_stage().dtype)

    # --- weight synchronisation ---------------------------------------------------------------------------------------

    @at_once
    def offer_weights(self, *, adapter_name: str | None = None, merge_and_sync: bool = True) -> WeightsOffer:
        """Return what :meth:`send_weights` can send: the base model and the adapter, or both merged.

        ``adapter_name`` may be left out if there is only one adapter. All processes must call this.
        """
        name = self._sent_name(adapter_name)
        if not name:
            return WeightsOffer("", False, metas(self.base.parameters), self._base_id)
        if merge_and_sync:
            return WeightsOffer(name, True, metas(self.base.merged(self.base.parameters, name, "merge_and_sync")), None)
        return WeightsOffer(
            name,
            False,
            metas(self.base.parameters),
            self._base_id,
            metas(adapter_sources(self.trainer, name)),
            self.trainer.peft_config(name),
        )

    @gathered
    def send_weights(
        self, adapter_name: str, merged: bool, pieces: Sequence[TensorMeta], *, keep: bool = True
    ) -> Bucket:
        """Return pieces of the weights that :meth:`offer_weights` has offered. All ranks must call this.

        keep: False on a rank whose pieces nobody needs: it takes part, and returns none.
        """
        sources: dict[str, ReadableWeight] = dict(self.base.parameters)
        if adapter_name and merged:
            sources = dict(self.base.merged(self.base.parameters, adapter_name, "merge_and_sync"))
        if adapter_name:
            sources |= adapter_sources(self.trainer, adapter_name)
        bucket = read_bucket(sources, pieces)
        return bucket if keep else Bucket((), ())

    # --- inside -------------------------------------------------------------------------------------------------------

    def _sent_name(self, adapter_name: str | None) -> str:
        """Return the name of the adapter whose weights are sent."""
        if adapter_name is None and len(self.optimizer_group) == 1:
            adapter_name = next(iter(self.optimizer_group))
        return self._group(adapter_name).adapter_name

    def _weights_of_files(self) -> dict[str, CutWeight]:
        """Return the weights of the model without adapters, by the names that the model's files have."""
        local = hub.resolve(self.model_id)
        fused = local.random_seed is None and CheckpointFiles(local.path).fused_experts
        return cut_weights(self._own_stage().pieces(fused_experts=fused), self._ranks)

    def _own_stage(self) -> Stage:
        return self.base.stage

    def _copy_tokenizer(self, staging: Path) -> None:
        if self.tokenizer_id is not None:
            copy_tokenizer(self.tokenizer_id, staging)


def _model_folder(stage: Stage, origin: Path) -> ModelFolder:
    """Return the files of a folder with other weights, and all else as in the folder that the model came from."""
    config = copy.deepcopy(stage.hf_config)
    config.dtype = stage.dtype
    files = {"config.json": config.to_json_string()}
    generation = origin / "generation_config.json"
    if generation.is_file():
        files[generation.name] = generation.read_text()
    return ModelFolder(files)
