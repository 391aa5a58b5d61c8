"""Sampling with a model that is being trained in this process, in one call: what a cookbook's loop needs.

The loop of ``submit`` and ``step`` that a server turns by itself stands here; tokens are drawn by
:class:`~twinkle.sampler.torch_sampler.TorchSampler`, on the model's own weights.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from twinkle.data_format import InputFeature, SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.model.components import build_template
from twinkle.model.multi_lora_model import MultiLoraTransformersModel
from twinkle.model.sequences import as_feature_list
from twinkle.model.types import FloatArray
from twinkle.sampler import types as engine_types
from twinkle.sampler.torch_sampler import TorchSampler

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["LocalSampler"]

Pairs = list[list[tuple[int, float]]]


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
        if params.repetition_penalty != 1.0:
            raise UnsupportedError("repetition_penalty: the torch sampler draws from the model's own distribution")
        features = self._encoded(as_feature_list(inputs), generation_prompt=params.max_tokens != 0)
        version = self._publish(adapter_name, adapter_path)
        try:
            requests = [self._request(feature, params, index, version) for index, feature in enumerate(features)]
            results = self._run(requests)
        finally:
            if version is not None:
                self.engine.retire(version)
        return [self._response(*each, params) for each in zip(features, results, strict=True)]

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

    def _request(
        self, feature: Mapping[str, Any], params: SamplingParams, index: int, version: str | None
    ) -> engine_types.SampleRequest:
        drawing = engine_types.SamplingParams(
            max_tokens=1 if params.max_tokens == 0 else params.max_tokens,  # a token that is thrown away
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=None if params.seed is None else params.seed + index,
            stop_tokens=tuple(params.stop_token_ids),
            stop_strings=tuple(params.stop_strings),
        )
        return engine_types.SampleRequest(
            request_id=f"local-{next(self._numbers)}",
            version_id=version,
            prompt=np.asarray(feature["input_ids"], dtype=np.int64),
            params=drawing,
            num_samples=params.num_samples,
            prompt_logprobs=bool(params.prompt_logprobs),
            topk_prompt_logprobs=params.prompt_logprobs or 0,
            topk_sample_logprobs=0 if params.logprobs is None or params.logprobs <= 1 else params.logprobs,
        )

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

    def _response(
        self, feature: Mapping[str, Any], result: engine_types.SampleResult, params: SamplingParams
    ) -> SampleResponse:
        scored = bool(params.prompt_logprobs)
        return SampleResponse(
            sequences=[self._sequence(feature, sequence, params) for sequence in result.sequences],
            prompt_token_ids=[int(token) for token in feature["input_ids"]],
            prompt_logprobs=_after_first(result.prompt_logprobs) if scored else None,
            topk_prompt_logprobs=_tops_after_first(result.topk_prompt_logprobs) if scored else None,
        )

    def _sequence(
        self, feature: Mapping[str, Any], sequence: engine_types.SampledSequence, params: SamplingParams
    ) -> SampledSequence:
        if params.max_tokens == 0:
            return SampledSequence("length", [], decoded="", new_input_feature=cast("InputFeature", feature))
        tokens = sequence.tokens.tolist()
        logprobs: Pairs | None = None
        if sequence.topk_logprobs is not None:
            logprobs = _pairs(sequence.topk_logprobs)
        elif params.logprobs is not None:
            logprobs = [[pair] for pair in zip(tokens, sequence.logprobs.tolist(), strict=True)]
        return SampledSequence(
            stop_reason=sequence.stop_reason,
            tokens=tokens,
            logprobs=logprobs,
            decoded=self.template.decode(tokens),
            new_input_feature=cast("InputFeature", self.template.concat_input_feature(feature, tokens)),
        )


def _pairs(top: engine_types.TopLogprobs) -> Pairs:
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    ]


def _after_first(logprobs: FloatArray | None) -> list[float | None]:
    assert logprobs is not None  # they were asked for
    return [None, *logprobs[1:].tolist()]


def _tops_after_first(top: engine_types.TopLogprobs | None) -> list[list[tuple[int, float]] | None]:
    assert top is not None
    return [None, *_pairs(top)[1:]]
