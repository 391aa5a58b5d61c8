"""From features to an answer, whole or line by line: all inputs of a request are sampled together."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from twinkle.data_format import SampledSequence, SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.sampler.features import engine_request, response_of, sequence_of
from twinkle.sampler.types import SampleRequest, SampleResult
from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.protocols.native.sampling_inputs import Row, plain
from twinkle.server.protocols.openai.choices import Choice
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import SamplingSessionRecord
from twinkle.server.verbs.templates import SamplingTemplate
from twinkle_client.types import SampledSequenceModel, SampleResponseModel

_CELL_BYTES = 28  # of a token and its log-probability in JSON, about


@dataclass(frozen=True)
class FeatureSampling:
    """A request, understood. ``most_bytes``: of its answer, which is written in a thread of ``text``."""

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
        requests = self._requests(stream=False)
        self._check_size(sum(len(request.prompt) * request.topk_prompt_logprobs for request in requests) * _CELL_BYTES)
        results = await self.sampling.results(self.session, requests)
        parts: list[bytes] = []
        size = 0
        # Input by input, each in a turn of its tenant's: JSON is written without letting other threads work.
        for feature, result in zip(self.features, results, strict=True):
            encode = partial(self._encode, feature, result, size)
            parts.append(await self.text.in_thread(self.session.tenant_id, encode))
            size += len(parts[-1])
        return b'{"samples":[' + b",".join(parts) + b"]}"

    async def lines(self, codec: TextCodec) -> AsyncGenerator[Mapping[str, object], None]:
        """The text of the only input's only sample, as it becomes final."""
        choice = Choice(codec, self.params.stop_strings, tools=False)
        async with aclosing(self.sampling.generate(self.session, self._requests(stream=True))) as items:
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

    def _encode(self, feature: Row, result: SampleResult, size: int) -> bytes:
        """In a thread, sample by sample. ``size``: of the answer so far."""
        parts: list[bytes] = []
        for part in _encoded(self.template, feature, result, self.params):
            parts.append(part)
            size += len(part)
            self._check_size(size)
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        """Raise for an answer of ``size`` bytes, if that is too much."""
        if size > self.most_bytes:
            allowed = (
                f"fewer inputs, samples or log-probabilities: the answer has {size} bytes or more, "
                f"allowed are {self.most_bytes} (max_json_result_bytes)"
            )
            raise InvalidInputError("inputs", f"{len(self.features)} inputs", allowed)


def _encoded(template: SamplingTemplate, feature: Row, result: SampleResult, params: SamplingParams) -> Iterator[bytes]:
    """Yield the JSON of a SampleResponseModel, a sample at a time. Numbers that are not finite become null."""
    yield b'{"sequences":['
    for number, sequence in enumerate(result.sequences):
        yield b"," * (number > 0) + _sequence(sequence_of(template, feature, sequence, params))
    response = response_of(template, feature, replace(result, sequences=[]), params)
    rest = SampleResponseModel(
        sequences=[], prompt_logprobs=response.prompt_logprobs, topk_prompt_logprobs=response.topk_prompt_logprobs
    )
    yield b"]," + rest.model_dump_json(exclude={"sequences"}).encode().removeprefix(b"{")


def _sequence(sequence: SampledSequence) -> bytes:
    model = SampledSequenceModel(
        stop_reason=sequence.stop_reason,
        tokens=sequence.tokens,
        logprobs=cast("list[list[tuple[int, float]] | None] | None", sequence.logprobs),
        decoded=sequence.decoded,
        new_input_feature=cast("dict[str, Any]", plain(sequence.new_input_feature)),
    )
    return model.model_dump_json().encode()
