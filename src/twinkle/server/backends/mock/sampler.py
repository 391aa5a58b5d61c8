"""The mock's sampler and text codec.

Sixteen candidates may follow each token, and the mock's model says how likely each of them is.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np

from twinkle.errors import InvalidInputError
from twinkle.model.types import FloatArray, IntArray
from twinkle.sampler.types import (
    DrawnTokens,
    Finished,
    Progress,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    StopReason,
    TopLogprobs,
)
from twinkle.sampler.validation import Limits, check_request
from twinkle.server.backends.mock.trainer import SIZE, Doubles, MockTrainer, features, logprobs, read_checkpoint

_CANDIDATES = 16  # tokens that may follow a token; the end token is one of them
_TURN = 16  # tokens that a sequence gains in one step
_DRAWS = 2**32  # stands for a sample's number in the seed of tokens drawn for the prompt; above all real numbers


@dataclass
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[IntArray, FloatArray]] = field(default_factory=list)  # for every token: ids and logprobs, (k,)
    stop_reason: StopReason | None = None

    def arrays(self, k: int, start: int = 0) -> tuple[IntArray, FloatArray, TopLogprobs | None]:
        """Return tokens, log-probabilities and, where k > 0, the k likeliest tokens from ``start`` on."""
        top = None
        if k:
            token_ids = np.array([row[0] for row in self.tops[start:]], np.int64).reshape(-1, k)
            top = TopLogprobs(token_ids, np.array([row[1] for row in self.tops[start:]], np.float32).reshape(-1, k))
        return np.array(self.tokens[start:], np.int64), np.array(self.logprobs[start:], np.float32), top


@dataclass
class _Sampling:
    """A request under way. It holds the weights of its version, so it can go on when the version is dropped."""

    request: SampleRequest
    weights: FloatArray
    seed: int
    limit: int
    sequences: list[_Sequence]


class MockSampler:
    """A :class:`~twinkle.sampler.types.Sampler` over the adapters of a :class:`MockTrainer`.

    The text of tokens 5, 6 is ``"5 6 "``: stop strings are searched in it. ``pause``: seconds that a step sleeps.
    """

    def __init__(self, trainer: MockTrainer, *, max_length: int = 4096, end_token: int = 2, pause: float = 0.0) -> None:
        self.end_token = end_token
        self.max_length = max_length
        self.pause = pause
        self._trainer = trainer
        self._versions: dict[str, FloatArray] = {}
        self._requests: dict[str, _Sampling] = {}

    def publish(self, version_id: str, adapter_id: str) -> None:
        self._add(version_id, self._trainer.vector(adapter_id))

    def load_version(self, version_id: str, directory: str) -> None:
        """Read the weights from a directory that a function of :meth:`MockTrainer.prepare_save` wrote."""
        self._add(version_id, read_checkpoint(Path(directory))[0]["weights"])

    def retire(self, version_id: str) -> None:
        self._versions.pop(version_id, None)

    def version_ids(self) -> list[str]:
        return list(self._versions)

    def submit(self, request: SampleRequest) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is under way already")
        weights = np.zeros(SIZE, np.float32)  # the base model's
        if request.version_id is not None:
            if request.version_id not in self._versions:
                raise InvalidInputError("version_id", request.version_id, "a published version")
            weights = self._versions[request.version_id]
        limits = Limits(self._trainer.vocab_size, self.max_length, self.max_length, stop_strings=True)
        checked = check_request(request, limits)
        sequences = [_Sequence() for _ in range(request.num_samples)]
        sampling = _Sampling(request, weights, checked.seed & (2**64 - 1), checked.max_tokens, sequences)
        self._requests[request.request_id] = sampling

    def cancel(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Finished | Progress]:
        """Extend every unfinished sequence by up to 16 tokens, and return the requests that finished and the progress
        of streamed ones.
        """
        time.sleep(self.pause)
        events: list[Finished | Progress] = []
        for sampling in list(self._requests.values()):
            request = sampling.request
            for number, sequence in enumerate(sampling.sequences):
                start = len(sequence.tokens)
                for _ in range(_TURN):
                    if sequence.stop_reason is None:
                        self._extend(sampling, number, sequence)
                if request.stream and len(sequence.tokens) > start:
                    new = sequence.arrays(request.topk_sample_logprobs, start)
                    events.append(Progress(request.request_id, number, *new, sequence.stop_reason))
            if all(sequence.stop_reason is not None for sequence in sampling.sequences):
                del self._requests[request.request_id]
                result = _result(sampling, self._trainer.vocab_size, self.end_token)
                events.append(Finished(request.request_id, result))
        return events

    def _add(self, version_id: str, weights: FloatArray) -> None:
        if version_id in self._versions:
            raise InvalidInputError("version_id", version_id, "a name that no other version has")
        self._versions[version_id] = weights

    def _extend(self, sampling: _Sampling, number: int, sequence: _Sequence) -> None:
        request, params = sampling.request, sampling.request.params
        position = len(request.prompt) + len(sequence.tokens) - 1
        last = sequence.tokens[-1] if sequence.tokens else int(request.prompt[-1])
        candidates = _candidates(np.array(last), np.array(position), self.end_token, self._trainer.vocab_size)
        lp = logprobs(sampling.weights, features(np.array(last), candidates, np.array(position)))
        scores = lp
        if params.temperature > 0:
            noise = np.random.default_rng([sampling.seed, number, position]).gumbel(size=_CANDIDATES)
            scores = lp / params.temperature + noise
        best = int(scores.argmax())
        sequence.tokens.append(int(candidates[best]))
        sequence.logprobs.append(float(lp[best]))
        if request.topk_sample_logprobs:
            sequence.tops.append(_likeliest(candidates, lp, request.topk_sample_logprobs))
        if self._stops(params, sequence.tokens):
            sequence.stop_reason = "stop"
        elif len(sequence.tokens) >= sampling.limit:
            sequence.stop_reason = "length"

    def _stops(self, params: SamplingParams, tokens: list[int]) -> bool:
        ends = (self.end_token, *params.stop_tokens) if params.stop_at_eos else params.stop_tokens
        text = "".join(f"{token} " for token in tokens) if params.stop_strings else ""
        return tokens[-1] in ends or any(stop in text for stop in params.stop_strings)


def _candidates(last: IntArray, positions: IntArray, end_token: int, vocab_size: int) -> IntArray:
    """Return the tokens, (…, 16), that may follow the token ``last`` at its position. The arguments broadcast."""
    candidates: IntArray = ((last * 7 + positions * 5)[..., None] + np.arange(_CANDIDATES) * 11 + 3) % vocab_size
    candidates[..., 0] = end_token
    return candidates


def _likeliest(tokens: IntArray, lp: Doubles, k: int) -> tuple[IntArray, FloatArray]:
    """Return the k likeliest tokens and their log-probabilities, (k,) each, likeliest first.

    If there are fewer than k candidates, the remaining cells hold token 0 and −inf.
    """
    order = np.argsort(-lp, kind="stable")[:k]
    token_ids, logps = np.zeros(k, np.int64), np.full(k, -np.inf, np.float32)
    token_ids[: len(order)], logps[: len(order)] = tokens[order], lp[order]
    return token_ids, logps


def _result(sampling: _Sampling, vocab_size: int, end_token: int) -> SampleResult:
    request, prompt, weights = sampling.request, sampling.request.prompt, sampling.weights
    sequences = []
    for sequence in sampling.sequences:
        tokens, drawn_logprobs, likeliest = sequence.arrays(request.topk_sample_logprobs)
        sequences.append(SampledSequence(tokens, drawn_logprobs, sequence.stop_reason or "length", likeliest))
    positions = np.arange(len(prompt) - 1)
    skipped = 0 if request.prompt_logprobs_last_n is None else len(positions) - request.prompt_logprobs_last_n
    prompt_logprobs = top = targets = drawn = None
    if request.prompt_logprobs:
        lp = logprobs(weights, features(prompt[:-1], prompt[1:], positions))
        prompt_logprobs = np.concatenate([[np.nan], lp]).astype(np.float32)
        prompt_logprobs[: skipped + 1] = np.nan
    if request.topk_prompt_logprobs > 0:
        top = _top(weights, prompt, min(request.topk_prompt_logprobs, vocab_size), skipped)
    if request.target_prompt_logprobs is not None:
        named = request.target_prompt_logprobs
        lp = logprobs(weights, features(prompt[:-1, None], named, positions[:, None]))
        targets = np.where(named < 0, 0.0, lp).astype(np.float32)
    if request.prompt_alt_tokens > 0:
        drawn = _drawn(sampling, vocab_size, end_token)
    return SampleResult(sequences, prompt_logprobs, top, targets, drawn)


def _top(weights: FloatArray, prompt: IntArray, k: int, skipped: int) -> TopLogprobs:
    """Return for each position the k likeliest of the tokens 0 to k + 63.

    Position 0, which has no context, and the ``skipped`` positions after it have none: token 0 and −inf.
    """
    choices = np.arange(k + 64)
    positions = np.arange(len(prompt) - 1)
    lp = logprobs(weights, features(prompt[:-1, None], choices[None], positions[:, None]))
    order = np.argsort(-lp, axis=1, kind="stable")[:, :k]
    token_ids = np.concatenate([np.zeros((1, k), np.int64), order])
    values = np.concatenate([np.full((1, k), -np.inf), np.take_along_axis(lp, order, axis=1)])
    token_ids[: skipped + 1], values[: skipped + 1] = 0, -np.inf
    return TopLogprobs(token_ids, values.astype(np.float32))


def _drawn(sampling: _Sampling, vocab_size: int, end_token: int) -> DrawnTokens:
    before, k = sampling.request.prompt[:-1], sampling.request.prompt_alt_tokens
    positions = np.arange(len(before))
    candidates = _candidates(before, positions, end_token, vocab_size)
    lp = logprobs(sampling.weights, features(before[:, None], candidates, positions[:, None]))
    generators = [np.random.default_rng([sampling.seed, _DRAWS, position]) for position in range(len(before))]
    noise = np.array([each.gumbel(size=(k, _CANDIDATES)) for each in generators]).reshape(-1, k, _CANDIDATES)
    best = (lp[:, None] + noise).argmax(axis=2)
    drawn_logprobs = np.take_along_axis(lp, best, axis=1).astype(np.float32)
    return DrawnTokens(np.take_along_axis(candidates, best, axis=1), drawn_logprobs)


class MockTextCodec:
    """A :class:`~twinkle.server.backends.text_codec.TextCodec`: the text of tokens 5, 6 is ``"5 6 "``.

    A word that is not a number becomes the token that its checksum selects.
    """

    def __init__(self, vocab_size: int, end_token: int) -> None:
        self._vocab_size = vocab_size
        self._end_token = end_token

    def encode(self, text: str) -> list[int]:
        return [int(word) if word.isdecimal() else crc32(word.encode()) % self._vocab_size for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.token_text(token) for token in tokens if token != self._end_token)

    def token_text(self, token: int) -> str:
        return f"{token} "

    def special_token(self, text: str) -> int | None:
        return None

    def encode_chat(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> list[int]:
        parts = [json.dumps(tool) for tool in tools] + [
            f"{message['role']} {message['content']}" for message in messages
        ]
        return self.encode(" ".join([*parts, "assistant"]))
