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
from twinkle.server.text_codec import TextCodec
from twinkle.server.types import SamplingSessionRecord
from twinkle.server.work_pools import FairPool
from twinkle_client.types import SampledSequenceModel, SampleResponseModel


@dataclass(frozen=True)
class FeatureSampling:
    """A request, understood. ``most_bytes``: of its answer."""

    request_id: str
    text: FairPool
    sampling: SamplerService
    session: SamplingSessionRecord
    template: SamplingTemplate
    features: Sequence[Row]
    params: SamplingParams
    most_bytes: int

    async def answer(self) -> bytes:
        """JSON of a SampleResponseModelList."""
        results = await results_of(self.sampling, self.session, self._requests(stream=False))
        return await self.text.in_thread(self.session.tenant_id, partial(self._assemble, results))

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

    def _assemble(self, results: Sequence[SampleResult]) -> bytes:
        """In a thread, input by input: neither time nor memory for all of them at once is asked for."""
        parts: list[bytes] = []
        size = 0
        for feature, result in zip(self.features, results, strict=True):
            parts.append(_encoded(response_of(self.template, feature, result, self.params)))
            size += len(parts[-1])
            if size > self.most_bytes:
                allowed = f"fewer inputs or samples: the answer has more than {self.most_bytes} bytes"
                raise InvalidInputError("inputs", f"{len(self.features)} inputs", allowed)
        return b'{"samples":[' + b",".join(parts) + b"]}"


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
