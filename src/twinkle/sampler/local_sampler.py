"""Sampling with a model that is being trained in this process, in one call: what a cookbook's loop needs.

The loop of ``submit`` and ``step`` that a server turns by itself stands here; tokens are drawn by
:class:`~twinkle.sampler.torch_sampler.TorchSampler`, on the model's own weights.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.model.components import build_template
from twinkle.model.multi_lora_model import MultiLoraTransformersModel
from twinkle.model.sequences import as_feature_list
from twinkle.sampler import types as engine_types
from twinkle.sampler.features import engine_request, refuse_unsupported, response_of
from twinkle.sampler.torch_sampler import TorchSampler

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["LocalSampler"]


class LocalSampler:
    """Generates with the adapters of a :class:`MultiLoraTransformersModel`, each with its weights of that moment.

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
        self._model = model
        self.set_template(template)
        self.engine = TorchSampler(
            model.trainer, self.template.tokenizer, kv_budget_bytes=kv_budget_bytes, max_sequences=max_sequences
        )
        self._numbers = count()

    def set_template(self, template_cls: "Template | type[Template] | str", **options: Any) -> None:
        """A class or name is made for the model's tokenizer; further keywords are its constructor's."""
        if isinstance(template_cls, str | type):
            options["model_id"] = self._model.tokenizer_id
        self.template: Template = build_template(template_cls, options)

    def sample(
        self,
        inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        adapter_name: str | None = None,
        adapter_path: str | None = None,
    ) -> list[SampleResponse]:
        """One response for each trajectory or feature, with ``num_samples`` sequences.

        adapter_name: with this adapter's weights as they are now; adapter_path: with a directory in PEFT's format;
        neither: with the base model. A ``seed`` is the first input's; the next one has the next number, so that inputs
        that are alike get samples that are not. ``max_tokens=0`` generates nothing and scores the prompt, which then is
        the whole conversation. Log-probabilities are those of the tempered distribution, as a loss with the same
        ``temperature`` computes them; those of the prompt are at temperature 1.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        refuse_unsupported(params)
        features = self._encoded(as_feature_list(inputs), generation_prompt=params.max_tokens != 0)
        version = self._publish(adapter_name, adapter_path)
        try:
            requests = [
                engine_request(feature, params, index, version, f"local-{next(self._numbers)}")
                for index, feature in enumerate(features)
            ]
            results = self._run(requests)
        finally:
            if version is not None:
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

    def _publish(self, adapter_name: str | None, adapter_path: str | None) -> str | None:
        """A version for this call alone."""
        if adapter_name is not None and adapter_path is not None:
            raise InvalidInputError("adapter_path", adapter_path, f"None beside adapter_name {adapter_name!r}")
        version = f"local-{next(self._numbers)}"
        if adapter_path is not None:
            self.engine.load_version(version, adapter_path)
        elif adapter_name is not None:
            if adapter_name not in self._model.optimizer_group:
                raise UnknownNameError("adapter", adapter_name, self._model.optimizer_group or ("none",))
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
