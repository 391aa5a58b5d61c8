"""From prompts to an answer, whole or in chunks: all samples of all prompts of a request are generated together."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import numpy as np

from twinkle.sampler.types import SampleRequest, SampleResult
from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.protocols.openai.bodies import Format, Json, Usage
from twinkle.server.protocols.openai.choices import Choice
from twinkle.server.protocols.openai.requests import GenerationFields
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import SamplingSessionRecord


@dataclass(frozen=True)
class Generation:
    """A request and what answers it. ``prompts`` are tokens; choice number i belongs to prompt i // wanted.samples.

    ``text``: threads for decoding. ``form`` writes the answer, and has its id.
    """

    wanted: GenerationFields
    prompts: Sequence[Sequence[int]]
    form: Format
    codec: TextCodec
    session: SamplingSessionRecord
    sampling: SamplerService
    text: FairPool
    tools: bool = False

    async def answer(self) -> bytes:
        """Return the whole answer as JSON."""
        results = await self.sampling.results(self.session, self._requests(stream=False))
        return await self.text.in_thread(self.session.tenant_id, partial(self._assemble, results))

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Yield the answer as it comes into being."""
        choices = self._choices()
        opened: set[int] = set()
        cached = 0
        async with aclosing(self.sampling.generate(self.session, self._requests(stream=True))) as items:
            async for number, item in items:
                if isinstance(item, SampleResult):
                    cached += item.cached_prompt_tokens
                    continue
                index = number * self.wanted.samples + item.index
                opening = self.form.opening(index) if index not in opened else None
                opened.add(index)
                if opening is not None:
                    yield opening
                delta = choices[index].push(item)
                if not delta.empty:
                    yield self.form.chunk(index, delta)
        if self.wanted.include_usage:
            yield self.form.usage(self._usage(choices, cached))

    def _choices(self) -> list[Choice]:
        count = len(self.prompts) * self.wanted.samples
        return [Choice(self.codec, self.wanted.stop, tools=self.tools) for _ in range(count)]

    def _assemble(self, results: Sequence[SampleResult]) -> bytes:
        """Write the answer, in a thread: the text and log-probabilities of many long samples take a while."""
        choices = self._choices()
        sequences = [sequence for result in results for sequence in result.sequences]
        deltas = [choice.push(sequence) for choice, sequence in zip(choices, sequences, strict=True)]
        usage = self._usage(choices, sum(result.cached_prompt_tokens for result in results))
        return json.dumps(self.form.whole(deltas, usage), allow_nan=False).encode()

    def _usage(self, choices: Sequence[Choice], cached: int) -> Usage:
        prompt = sum(len(tokens) for tokens in self.prompts)
        return Usage(prompt, sum(choice.completion_tokens for choice in choices), cached)

    def _requests(self, *, stream: bool) -> list[SampleRequest]:
        return [
            SampleRequest(
                request_id=f"{self.form.id}-{number}",
                version_id=self.session.version_id,
                prompt=np.array(tokens, np.int64),
                params=self.wanted.params,
                num_samples=self.wanted.samples,
                topk_sample_logprobs=self.wanted.top or 0,
                stream=stream,
            )
            for number, tokens in enumerate(self.prompts)
        ]
