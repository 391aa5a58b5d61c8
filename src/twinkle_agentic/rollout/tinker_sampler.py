"""A sampling client of the tinker SDK as a sampler of the library, so that rollouts run on any Tinker server."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from twinkle.data_format import InputFeature, SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.extras import require

if TYPE_CHECKING:
    import tinker

    from twinkle.template import Template

__all__ = ["TinkerSampler"]


class TinkerSampler:
    """Samples with a ``SamplingClient`` of the tinker SDK; the template encodes and decodes in this process.

    All inputs of a call are sent at once. A ``seed`` belongs to the first input, and each further input uses the next
    number.
    """

    def __init__(self, sampling_client: "tinker.SamplingClient", template: "Template") -> None:
        require("tinker", "TinkerSampler")
        self._client = sampling_client
        self.template = template

    def sample(
        self, inputs: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | Mapping[str, Any] | None = None
    ) -> list[SampleResponse]:
        """Return one response for each trajectory or encoded feature, in order."""
        import tinker

        given = sampling_params or {}
        params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given)
        _refuse_unsupported(params)
        features = [self._encoded(each) for each in inputs]
        futures = [
            self._client.sample(
                tinker.ModelInput.from_ints([int(token) for token in feature["input_ids"]]),
                params.num_samples,
                tinker.SamplingParams(
                    max_tokens=params.max_tokens,
                    seed=None if params.seed is None else params.seed + index,
                    stop=cast("Any", params.stop),
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                ),
            )
            for index, feature in enumerate(features)
        ]
        answers = [future.result() for future in futures]
        return [
            SampleResponse([self._sequence(feature, sequence, params) for sequence in answer.sequences])
            for feature, answer in zip(features, answers, strict=True)
        ]

    def _encoded(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return given if "input_ids" in given else self.template.encode(given, add_generation_prompt=True)

    def _sequence(self, feature: Mapping[str, Any], answer: Any, params: SamplingParams) -> SampledSequence:
        tokens = [int(token) for token in answer.tokens]
        logprobs = None
        if params.logprobs is not None and answer.logprobs is not None:
            logprobs = [[(token, float(value))] for token, value in zip(tokens, answer.logprobs, strict=True)]
        return SampledSequence(
            stop_reason=answer.stop_reason,
            tokens=tokens,
            logprobs=logprobs,
            decoded=self.template.decode(tokens),
            new_input_feature=cast("InputFeature", self.template.concat_input_feature(feature, tokens)),
        )


def _refuse_unsupported(params: SamplingParams) -> None:
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "ignore_eos"):
        default = getattr(SamplingParams, name)
        if getattr(params, name) != default:
            raise UnsupportedError(f"{name}: only {default}, the tinker SDK has no such parameter")
    if params.prompt_logprobs is not None:
        raise UnsupportedError("prompt_logprobs: only None; compute_logprobs of the tinker SDK scores prompts")
    if params.logprobs is not None and params.logprobs > 1:
        raise InvalidInputError("logprobs", params.logprobs, "None, 0 or 1: the log-probability of the sampled token")
