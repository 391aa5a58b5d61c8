"""From prompts to an answer, whole or in chunks: all samples of all prompts of a request are generated together."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from twinkle.model.types import IntArray
from twinkle.sampler.types import SampleRequest, SampleResult, SamplingParams
from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.protocols.openai.bodies import Format, Json, Usage
from twinkle.server.protocols.openai.choices import Choice, Delta
from twinkle.server.services.sampling.sampler_service import SamplerService, generate_together, results_of
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import SamplingSessionRecord


@dataclass(frozen=True)
class Generation:
    """A request, understood. ``prompts``: (T,) each; choice number i belongs to prompt i // samples."""

    request_id: str
    text: FairPool
    sampling: SamplerService
    session: SamplingSessionRecord
    codec: TextCodec
    prompts: Sequence[IntArray]
    params: SamplingParams
    samples: int
    top_logprobs: int
    tools: bool = False

    async def answer(self, form: Format) -> bytes:
        """JSON."""
        results = await results_of(self.sampling, self.session, self._requests(stream=False))
        return await self.text.in_thread(self.session.tenant_id, partial(self._assemble, form, results))

    async def chunks(self, form: Format, *, include_usage: bool) -> AsyncGenerator[Json, None]:
        """The answer as it comes into being."""
        choices = self._choices()
        opened: set[int] = set()
        cached = 0
        async with aclosing(generate_together(self.sampling, self.session, self._requests(stream=True))) as items:
            async for number, item in items:
                if isinstance(item, SampleResult):
                    cached += item.cached_prompt_tokens
                    continue
                index = number * self.samples + item.index
                opening = form.opening(index) if index not in opened else None
                opened.add(index)
                if opening is not None:
                    yield opening
                delta = choices[index].push(item)
                if not delta.empty:
                    yield form.chunk(index, delta)
        if include_usage:
            yield form.usage(self._usage(choices, cached))

    def _choices(self) -> list[Choice]:
        count = len(self.prompts) * self.samples
        return [Choice(self.codec, self.params.stop_strings, tools=self.tools) for _ in range(count)]

    def _assemble(self, form: Format, results: Sequence[SampleResult]) -> bytes:
        """In a thread: the text and log-probabilities of many long samples take a while to write down."""
        choices = self._choices()
        sequences = [sequence for result in results for sequence in result.sequences]
        deltas: list[Delta] = [choice.push(sequence) for choice, sequence in zip(choices, sequences, strict=True)]
        usage = self._usage(choices, sum(result.cached_prompt_tokens for result in results))
        return json.dumps(form.whole(deltas, usage), allow_nan=False).encode()

    def _usage(self, choices: Sequence[Choice], cached: int) -> Usage:
        prompt = sum(len(tokens) for tokens in self.prompts)
        return Usage(prompt, sum(choice.completion_tokens for choice in choices), cached)

    def _requests(self, *, stream: bool) -> list[SampleRequest]:
        return [self._request(number, stream) for number in range(len(self.prompts))]

    def _request(self, number: int, stream: bool) -> SampleRequest:
        return SampleRequest(
            request_id=f"{self.request_id}-{number}",
            version_id=self.session.version_id,
            prompt=self.prompts[number],
            params=self.params,
            num_samples=self.samples,
            topk_sample_logprobs=self.top_logprobs,
            stream=stream,
        )
