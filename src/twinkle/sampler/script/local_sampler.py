"""Sampling in one call, with a model that is trained in this process or with a copy of it, for the cookbook's loops.

Tokens are drawn by :class:`~twinkle.sampler.torch_sampler.sampler.TorchSampler`.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
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
    """A sampler that generates with the base model and the adapters of a :class:`MultiLoraTransformersModel`.

    model: a model of this process, whose weights the sampler uses; or a model on a worker group, in which case the
    sampler loads its own copy of the base model, and adapters come by :meth:`receive_weights`.
    template: encodes trajectories, and joins prompt and completion; the default is the model's plain template.
    kv_budget_bytes, max_sequences: see :class:`TorchSampler`.
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
        self._versions.receive(adapter_name, lambda version: self.engine.receive_version(version, peft_config, weights))

    @remote_function(dispatch=own_prompts, collect="flatten", lazy_collect=False)
    def sample(
        self,
        inputs: Inputs,
        sampling_params: Params = None,
        adapter_name: str | None = "",
        adapter_path: str | PathLike[str] | None = None,
    ) -> list[SampleResponse]:
        """Return one response for each trajectory or feature, with ``num_samples`` sequences each.

        sampling_params: a :class:`SamplingParams`, or its fields as a mapping.
        adapter_name: sample with the weights received for this adapter or, if none were, with its present weights.
        adapter_path: sample with an adapter from a directory in PEFT's format.
        With neither of the two, the base model is used.

        A ``seed`` belongs to the first input, and each further input uses the next number, so that equal inputs get
        different samples. ``max_tokens=0`` generates nothing and scores the prompt, which is then the whole
        conversation. Log-probabilities are those of the tempered distribution, as a loss with the same ``temperature``
        computes them; those of the prompt are at temperature 1.
        """
        params = as_sampling_params(sampling_params)
        if isinstance(inputs, Sequence) and not inputs:  # a worker without inputs: fewer inputs than workers
            return []
        with self._versions.chosen(adapter_name, adapter_path) as version:
            return sample_in_one_call(self.engine, self.template, inputs, params, version)


def hand_over(model: MultiLoraTransformersModel, sampler: ReceivesWeights, adapter_name: str) -> None:
    """Send the present weights of the model's adapter to the sampler. On Ray they go from worker to worker directly."""
    weights = model.get_state_dict(adapter_name=adapter_name)
    sampler.receive_weights(adapter_name, weights, model.get_peft_config_dict(adapter_name=adapter_name))
