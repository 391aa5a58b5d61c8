"""Sampling in one call, with a model that is being trained in this process or with a copy of it: what a cookbook's loop
needs.

The loop of ``submit`` and ``step`` that a server turns by itself stands here; tokens are drawn by
:class:`~twinkle.sampler.torch_sampler.TorchSampler`. On a worker group every worker answers some of the inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.infra import remote_class, remote_function
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.dispatch import Arguments
from twinkle.infra.proxy import RemoteProxy
from twinkle.model.components import build_template
from twinkle.model.multi_lora_model import MultiLoraTransformersModel
from twinkle.model.sequences import as_feature_list
from twinkle.model.trainer import Trainer
from twinkle.sampler import types as engine_types
from twinkle.sampler.features import engine_request, refuse_unsupported, response_of
from twinkle.sampler.torch_sampler import TorchSampler

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["LocalSampler", "hand_over"]


def own_prompts(
    n_workers: int, i: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, device_mesh: DeviceMesh
) -> Arguments:
    """The i-th worker's inputs. A seed is moved on to its first one, so that samples are those of a single process."""
    given = signature(LocalSampler.sample).bind(None, *args, **kwargs).arguments
    inputs, params = as_feature_list(given["inputs"]), given.get("sampling_params")
    place = device_mesh.get_slice(len(inputs), i)
    if params is not None and params.seed is not None:
        params = replace(params, seed=params.seed + place.start)
    others = {name: value for name, value in given.items() if name != "self"}
    return (), {**others, "inputs": inputs[place], "sampling_params": params}


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
        self._trainer = Trainer.from_pretrained(base.model_id, dtype=base.dtype) if elsewhere else model.trainer
        self._tokenizer_id = base.tokenizer_id
        self.set_template(template)
        self.engine = TorchSampler(
            self._trainer, self.template.tokenizer, kv_budget_bytes=kv_budget_bytes, max_sequences=max_sequences
        )
        self._numbers = count()
        self._received: dict[str, str] = {}  # versions by the names of adapters

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
        version = f"{adapter_name}-{next(self._numbers)}"
        self.engine.receive_version(version, peft_config, weights)
        if adapter_name in self._received:
            self.engine.retire(self._received[adapter_name])
        self._received[adapter_name] = version

    @remote_function(dispatch=own_prompts, collect="flatten", lazy_collect=False)
    def sample(
        self,
        inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        adapter_name: str | None = None,
        adapter_path: str | None = None,
    ) -> list[SampleResponse]:
        """One response for each trajectory or feature, with ``num_samples`` sequences.

        adapter_name: with this adapter's weights as they were received or, if they never were, as they are now;
        adapter_path: with a directory in PEFT's format; neither: with the base model. A ``seed`` is the first input's;
        the next one has the next number, so that inputs that are alike get samples that are not. ``max_tokens=0``
        generates nothing and scores the prompt, which then is the whole conversation. Log-probabilities are those of
        the tempered distribution, as a loss with the same ``temperature`` computes them; those of the prompt are at
        temperature 1.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        refuse_unsupported(params)
        if isinstance(inputs, Sequence) and not inputs:  # of a worker, where there are fewer inputs than workers
            return []
        features = self._encoded(as_feature_list(inputs), generation_prompt=params.max_tokens != 0)
        version = self._version(adapter_name, adapter_path)
        try:
            requests = [
                engine_request(feature, params, index, version, f"local-{next(self._numbers)}")
                for index, feature in enumerate(features)
            ]
            results = self._run(requests)
        finally:
            if version is not None and version not in self._received.values():
                self.engine.retire(version)
        return [response_of(self.template, *each, params) for each in zip(features, results, strict=True)]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _encoded(self, inputs: Sequence[Mapping[str, Any]], generation_prompt: bool) -> list[Mapping[str, Any]]:
        encoded = {"input_ids" in each for each in inputs}
        if len(encoded) > 1:
            raise InvalidInputError("inputs", "some encoded and some not", "InputFeatures or Trajectories, not both")
        if encoded == {True}:
            return list(inputs)
        return list(self.template.batch_encode(inputs, add_generation_prompt=generation_prompt))

    def _version(self, adapter_name: str | None, adapter_path: str | None) -> str | None:
        """That which was received, or else one for this call alone."""
        if adapter_name is not None and adapter_path is not None:
            raise InvalidInputError("adapter_path", adapter_path, f"None beside adapter_name {adapter_name!r}")
        if adapter_name in self._received:
            return self._received[adapter_name]
        version = f"local-{next(self._numbers)}"
        if adapter_path is not None:
            self.engine.load_version(version, adapter_path)
        elif adapter_name is not None:
            if adapter_name not in self._trainer.adapter_ids():
                known = (*self._trainer.adapter_ids(), *self._received)
                raise UnknownNameError("adapter", adapter_name, known or ("none",))
            self.engine.publish(version, adapter_name)
        else:
            return None
        return version

    def _run(self, requests: Sequence[engine_types.SampleRequest]) -> list[engine_types.SampleResult]:
        """The results in the order of the requests; the first failure is raised, and nothing goes on after it."""
        done: dict[str, engine_types.SampleResult] = {}
        try:
            for request in requests:
                self.engine.submit(request)
            while self.engine.busy:
                for event in self.engine.step():
                    assert isinstance(event, engine_types.Finished)  # nothing is streamed
                    if isinstance(event.outcome, engine_types.SampleFailure):
                        raise event.outcome.error
                    done[event.request_id] = event.outcome
        finally:
            for request in requests:
                self.engine.cancel(request.request_id)
        return [done[request.request_id] for request in requests]


def hand_over(model: MultiLoraTransformersModel, sampler: LocalSampler, adapter_name: str) -> None:
    """Let the sampler take over an adapter as it is now. On Ray its weights go from worker to worker directly."""
    weights = model.get_state_dict(adapter_name=adapter_name)
    sampler.receive_weights(adapter_name, weights, model.get_peft_config_dict(adapter_name=adapter_name))
