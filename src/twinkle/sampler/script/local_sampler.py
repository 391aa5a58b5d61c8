"""Sampling in one call, with a model that is being trained in this process or with a copy of it: what a cookbook's loop
needs. Tokens are drawn by :class:`~twinkle.sampler.torch_sampler.sampler.TorchSampler`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from twinkle.data_format import SampleResponse
from twinkle.infra import remote_class, remote_function
from twinkle.infra.proxy import RemoteProxy
from twinkle.model.library.components import build_template
from twinkle.model.multi_lora.model import MultiLoraTransformersModel
from twinkle.model.trainer.trainer import Trainer
from twinkle.sampler.script.features import as_sampling_params
from twinkle.sampler.script.in_one_call import (
    AdapterVersions,
    Inputs,
    Params,
    ReceivesWeights,
    own_prompts,
    sample_in_one_call,
)
from twinkle.sampler.torch_sampler.sampler import TorchSampler

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["LocalSampler", "hand_over"]

_at_once = remote_function(dispatch="all", collect="first", lazy_collect=False)


@remote_class()
class LocalSampler:
    """Generates with the adapters of a :class:`MultiLoraTransformersModel`, each with its weights of that moment.

    model: one of this process, whose weights it uses; or one on a worker group, of whose base it loads a copy here. Its
    adapters come by :meth:`receive_weights`.
    template: encodes trajectories, and puts prompt and completion together; without one the model's plain template.
    kv_budget_bytes, max_sequences: as :class:`TorchSampler` has them.
    """

    def __init__(
        self,
        model: MultiLoraTransformersModel,
        template: "Template | type[Template] | str" = "Template",
        *,
        kv_budget_bytes: int | None = None,
        max_sequences: int | None = None,
    ) -> None:
        base = model.base_model()
        elsewhere = isinstance(model, RemoteProxy)
        trainer = Trainer.from_pretrained(base.model_id, dtype=base.dtype) if elsewhere else model.trainer
        self._tokenizer_id = base.tokenizer_id
        self.set_template(template)
        self.engine = TorchSampler(
            trainer, self.template.tokenizer, kv_budget_bytes=kv_budget_bytes, max_sequences=max_sequences
        )
        self._versions = AdapterVersions(self.engine, trainer)

    @_at_once
    def set_template(self, template_cls: "Template | type[Template] | str", **options: Any) -> None:
        """A class or name is made for the model's tokenizer; further keywords are its constructor's."""
        if isinstance(template_cls, str | type):
            options["model_id"] = self._tokenizer_id
        self.template: Template = build_template(template_cls, options)

    @_at_once
    def receive_weights(self, adapter_name: str, weights: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
        """From now on sample with these weights where ``adapter_name`` is asked for, until others come.

        They are what a model's ``get_state_dict`` and ``get_peft_config_dict`` return. A promise of the weights goes to
        the workers of a sampler unseen.
        """
        self._versions.receive(adapter_name, lambda version: self.engine.receive_version(version, peft_config, weights))

    @remote_function(dispatch=own_prompts, collect="flatten", lazy_collect=False)
    def sample(
        self,
        inputs: Inputs,
        sampling_params: Params = None,
        adapter_name: str | None = "",
        adapter_path: str | None = None,
    ) -> list[SampleResponse]:
        """One response for each trajectory or feature, with ``num_samples`` sequences.

        sampling_params: a :class:`SamplingParams`, or its fields as a mapping. adapter_name: with this adapter's
        weights as they were received or, if they never were, as they are now; adapter_path: with a directory in PEFT's
        format; neither: with the base model. A ``seed`` is the first input's; the next one has the next number, so that
        inputs that are alike get samples that are not. ``max_tokens=0`` generates nothing and scores the prompt, which
        then is the whole conversation. Log-probabilities are those of the tempered distribution, as a loss with the
        same ``temperature`` computes them; those of the prompt are at temperature 1.
        """
        params = as_sampling_params(sampling_params)
        if isinstance(inputs, Sequence) and not inputs:  # of a worker, where there are fewer inputs than workers
            return []
        with self._versions.chosen(adapter_name, adapter_path) as version:
            return sample_in_one_call(self.engine, self.template, inputs, params, version)


def hand_over(model: MultiLoraTransformersModel, sampler: ReceivesWeights, adapter_name: str) -> None:
    """Let the sampler take over an adapter as it is now. On Ray its weights go from worker to worker directly."""
    weights = model.get_state_dict(adapter_name=adapter_name)
    sampler.receive_weights(adapter_name, weights, model.get_peft_config_dict(adapter_name=adapter_name))
