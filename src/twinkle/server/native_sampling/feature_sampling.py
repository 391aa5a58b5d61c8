"""From features to an answer, whole or line by line: all inputs of a request are sampled together."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.sampler.features import engine_request, response_of
from twinkle.sampler.types import SampleRequest, SampleResult
from twinkle.server.generating import generate_together, results_of
from twinkle.server.native_sampling.inputs import Row, plain
from twinkle.server.openai.choices import Choice
from twinkle.server.sampler_service import SamplerService
from twinkle.server.templates import SamplingTemplate
from twinkle.server.tenant_turns import TenantTurns
from twinkle.server.text_codec import TextCodec
from twinkle.server.types import SamplingSessionRecord
from twinkle_client.types import SampledSequenceModel, SampleResponseModel

_CELL_BYTES = 28  # of a token and its log-probability in JSON, about


@dataclass(frozen=True)
class FeatureSampling:
    """A request, understood. ``most_bytes``: of its answer, which is written in ``turns``."""

    request_id: str
    sampling: SamplerService
    session: SamplingSessionRecord
    template: SamplingTemplate
    features: Sequence[Row]
    params: SamplingParams
    most_bytes: int
    turns: TenantTurns

    async def answer(self) -> bytes:
        """JSON of a SampleResponseModelList."""
        requests = self._requests(stream=False)
        self._check_size(sum(len(request.prompt) * request.topk_prompt_logprobs for request in requests) * _CELL_BYTES)
        results = await results_of(self.sampling, self.session, requests)
        parts: list[bytes] = []
        # Input by input, each in a turn of its tenant's: JSON is written without letting other threads work.
        for feature, result in zip(self.features, results, strict=True):
            encode = partial(self._encode, feature, result)
            parts.append(await self.turns.in_thread(self.session.tenant_id, encode))
            self._check_size(sum(map(len, parts)))
        return b'{"samples":[' + b",".join(parts) + b"]}"

    async def lines(self, codec: TextCodec) -> AsyncGenerator[Mapping[str, object], None]:
        """The text of the only input's only sample, as it becomes final."""
        choice = Choice(codec, self.params.stop_strings, tools=False)
        async with aclosing(generate_together(self.sampling, self.session, self._requests(stream=True))) as items:
            async for _, item in items:
                if isinstance(item, SampleResult):
                    continue
                delta = choice.push(item)
                if delta.text or delta.finish_reason:
                    yield {"delta": delta.text, "finish_reason": delta.finish_reason}

    def _requests(self, *, stream: bool) -> list[SampleRequest]:
        version = self.session.version_id
        return [
            engine_request(feature, self.params, index, version, f"{self.request_id}-{index}", stream=stream)
            for index, feature in enumerate(self.features)
        ]

    def _encode(self, feature: Row, result: SampleResult) -> bytes:
        return _encoded(response_of(self.template, feature, result, self.params))

    def _check_size(self, size: int) -> None:
        """Raise for an answer of ``size`` bytes, if that is too much."""
        if size > self.most_bytes:
            allowed = (
                f"fewer inputs, samples or log-probabilities: the answer has {size} bytes or more, "
                f"allowed are {self.most_bytes} (max_json_result_bytes)"
            )
            raise InvalidInputError("inputs", f"{len(self.features)} inputs", allowed)


def _encoded(response: SampleResponse) -> bytes:
    """Numbers that are not finite become null."""
    sequences = [
        SampledSequenceModel(
            stop_reason=sequence.stop_reason,
            tokens=sequence.tokens,
            logprobs=cast("list[list[tuple[int, float]] | None] | None", sequence.logprobs),
            decoded=sequence.decoded,
            new_input_feature=cast("dict[str, Any]", plain(sequence.new_input_feature)),
        )
        for sequence in response.sequences
    ]
    model = SampleResponseModel(
        sequences=sequences,
        prompt_logprobs=response.prompt_logprobs,
        topk_prompt_logprobs=response.topk_prompt_logprobs,
    )
    return model.model_dump_json().encode()
