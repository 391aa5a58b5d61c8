"""Generating the answer to a request, whole or in parts, for all protocols in which answers are text.

All samples of all prompts of a request are generated together. A :class:`Format` writes the answer.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from twinkle.errors import InvalidInputError, UserError
from twinkle.images import SentImage, SentImages
from twinkle.model.types import Image
from twinkle.sampler.types import SampleRequest, SampleResult, SamplingParams
from twinkle.server.gateway.sampling_targets import Target
from twinkle.server.http.routes import Call
from twinkle.server.protocols.openai import models
from twinkle.server.protocols.openai.channels import ChannelFilter, channel_tokens
from twinkle.server.protocols.openai.choices import Choice, Delta
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.wire.image_files import ImageAllowance, from_data_uri

Json = dict[str, object]


class Wanted(Protocol):
    """What a request asks for, as far as generating depends on it.

    samples: number of samples of each prompt. stop: strings that end a sample. top: how many likeliest tokens to list
    at each position; None: no log-probabilities are requested.
    """

    @property
    def model(self) -> str: ...

    @property
    def samples(self) -> int: ...

    @property
    def stop(self) -> Sequence[str]: ...

    @property
    def top(self) -> int | None: ...

    @property
    def params(self) -> SamplingParams: ...


WantedT = TypeVar("WantedT", bound=Wanted)


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens of a request. ``cached_tokens``: the tokens of prompts that were found in the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Format(ABC):
    """Writes the answer to one request in one protocol. ``id``: the id of the answer, which all its parts have."""

    id: str

    @abstractmethod
    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """Return the body of a whole answer."""

    @abstractmethod
    def opening(self, index: int) -> list[Json]:
        """Return the parts of a stream that begin a choice."""

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> list[Json]:
        """Return the parts of a stream for a new part of one choice."""

    @abstractmethod
    def ending(self, usage: Usage) -> list[Json]:
        """Return the parts that end a stream."""


@dataclass(frozen=True)
class EncodedPrompt:
    """The tokens of a prompt. ``images``: placed among them; ``pixels``: how many their files have."""

    tokens: Sequence[int]
    images: tuple[Image, ...] = ()
    pixels: int = 0


@dataclass(frozen=True)
class Generation:
    """A request that is ready to be generated.

    prompts: choice number i belongs to prompt i // wanted.samples.
    form: writes the answer, and has its id.
    text: the thread pool for decoding text.
    tools: whether the answer may contain tool calls.
    chat: whether it is a message of a conversation, and not a text that goes on.
    """

    wanted: Wanted
    prompts: Sequence[EncodedPrompt]
    form: Format
    target: Target
    text: FairPool
    tools: bool
    chat: bool = True

    async def answer(self) -> bytes:
        """Return the whole answer as JSON."""
        session = self.target.session
        results = await self.target.sampling.results(session, self._requests(stream=False), self._pixels)
        return await self.text.in_thread(session.tenant_id, partial(self._assemble, results))

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Yield the answer in parts, as it is generated."""
        choices = self._choices()
        opened: set[int] = set()
        cached = 0
        generated = self.target.sampling.generate(self.target.session, self._requests(stream=True), self._pixels)
        async with aclosing(generated) as items:
            async for number, item in items:
                if isinstance(item, SampleResult):
                    cached += item.cached_prompt_tokens
                    continue
                index = number * self.wanted.samples + item.index
                for body in self.form.opening(index) if index not in opened else ():
                    yield body
                opened.add(index)
                delta = choices[index].push(item)
                for body in () if delta.empty else self.form.chunk(index, delta):
                    yield body
        for body in self.form.ending(self._usage(choices, cached)):
            yield body

    def waiting_for(self) -> str:
        """Return a line for a client that has no part of its answer yet: why it is queued, or that it is not."""
        reasons = map(self.target.sampling.why_queued, map(self._request_id, range(len(self.prompts))))
        return next((reason for reason in reasons if reason is not None), "the prompt is being computed")

    def _choices(self) -> list[Choice]:
        count = len(self.prompts) * self.wanted.samples
        codec, stop = self.target.codec, self.wanted.stop
        channels = channel_tokens(codec) if self.chat else None
        return [
            Choice(codec, stop, tools=self.tools, channels=None if channels is None else ChannelFilter(codec, channels))
            for _ in range(count)
        ]

    def _assemble(self, results: Sequence[SampleResult]) -> bytes:
        """Return the whole answer as JSON. Runs in a thread, because decoding many long samples takes a while."""
        choices = self._choices()
        sequences = [sequence for result in results for sequence in result.sequences]
        deltas = [choice.push(sequence) for choice, sequence in zip(choices, sequences, strict=True)]
        usage = self._usage(choices, sum(result.cached_prompt_tokens for result in results))
        return json.dumps(self.form.whole(deltas, usage), allow_nan=False).encode()

    def _usage(self, choices: Sequence[Choice], cached: int) -> Usage:
        prompt = sum(len(prompt.tokens) for prompt in self.prompts)
        return Usage(prompt, sum(choice.completion_tokens for choice in choices), cached)

    def _requests(self, *, stream: bool) -> list[SampleRequest]:
        return [
            SampleRequest(
                request_id=self._request_id(number),
                version_id=self.target.session.version_id,
                prompt=np.array(prompt.tokens, np.int64),
                params=self.wanted.params,
                num_samples=self.wanted.samples,
                topk_sample_logprobs=self.wanted.top or 0,
                images=prompt.images,
                stream=stream,
            )
            for number, prompt in enumerate(self.prompts)
        ]

    @property
    def _pixels(self) -> list[int]:
        return [prompt.pixels for prompt in self.prompts]

    def _request_id(self, number: int) -> str:
        return f"{self.form.id}-{number}"


async def target_of(call: Call[WantedT]) -> Target:
    """Find the weights to sample from; raise errors that are known before the text is tokenized."""
    _ = call.body.params, call.body.top  # these properties raise for values that do not fit together
    target = await models.resolve(call.gateway, call.body.model, call.tenant_id)
    _ = target.codec  # raises for a model without a tokenizer
    target.sampling.admission.check(call.tenant_id)
    return target


def files_of(call: Call[Any], target: Target, uris: Sequence[tuple[str, str]]) -> SentImages:
    """Return the images of a chat, each given as a data URI with the name of its field. Runs in a thread.

    In the chat's tokens each of them is one image token of the model.
    """
    model, limits = target.services.model, call.gateway.config.limits
    if uris and model.images is None:
        raise InvalidInputError(uris[0][1], "an image", f"text: {model.name}, as it is served here, reads text only")
    left = ImageAllowance(limits.max_images_per_request, limits.max_image_bytes)
    files = [SentImage(0, from_data_uri(uri, field, left), None, field) for uri, field in uris]
    return SentImages(tuple(files), beside=True)


async def with_images(target: Target, tokens: Sequence[int], images: SentImages) -> EncodedPrompt:
    """Return a prompt with its images, if it has some: placed among its tokens, and decoded in a pool of threads."""
    if not images:
        return EncodedPrompt(tokens)
    asked = SampleRequest("", target.session.version_id, np.array(tokens, np.int64), SamplingParams())
    placed, pixels = await target.sampling.read_images(target.session, asked, images)
    return EncodedPrompt(placed.prompt.tolist(), tuple(placed.images), pixels)


def check_length(prompts: Sequence[EncodedPrompt], target: Target) -> None:
    """Raise UserError if a prompt leaves no room for an answer in the model's context."""
    longest, context = max(len(prompt.tokens) for prompt in prompts), target.services.model.max_context_length
    if longest >= context:
        message = f"the prompt has {longest} tokens, allowed: fewer than {context}, the context of this model"
        raise UserError(message).with_code("context_length_exceeded")
