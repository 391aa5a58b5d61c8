"""The mock's sampler: few candidates follow a token, and the mock's model says how likely each is."""

import time
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

import numpy as np

from twinkle.errors import InvalidInputError
from twinkle.model.types import FloatArray, IntArray
from twinkle.sampler.types import (
    Finished,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    StopReason,
    TopLogprobs,
)
from twinkle.server.mock.trainer import SIZE, MockTrainer, features, logprobs, read_checkpoint

_CANDIDATES = 16  # tokens that may follow a token; the end token is one of them
_TURN = 16  # tokens a sequence gains in one step


@dataclass
class _Sequence:
    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason | None = None


@dataclass
class _Sampling:
    """A request under way."""

    request: SampleRequest
    seed: int
    limit: int
    sequences: list[_Sequence]

    @property
    def done(self) -> bool:
        return all(sequence.stop_reason is not None for sequence in self.sequences)


class MockSampler:
    """A :class:`~twinkle.sampler.types.Sampler` over the adapters of a :class:`MockTrainer`.

    The text of tokens 5, 6 is ``"5 6 "``: that is what stop strings are searched in. ``pause``: seconds a step takes.
    """

    def __init__(self, trainer: MockTrainer, *, max_length: int = 4096, end_token: int = 2, pause: float = 0.0) -> None:
        self.end_token = end_token
        self.max_length = max_length
        self.pause = pause
        self._trainer = trainer
        self._versions: dict[str, FloatArray] = {}
        self._retired: set[str] = set()
        self._requests: dict[str, _Sampling] = {}

    def publish(self, version_id: str, adapter_id: str) -> None:
        self._add(version_id, self._trainer.weights(adapter_id))

    def load_version(self, version_id: str, directory: str) -> None:
        """Read a directory that :meth:`MockTrainer.save` wrote."""
        self._add(version_id, read_checkpoint(Path(directory))[0]["weights"])

    def retire(self, version_id: str) -> None:
        if version_id in self._versions:
            self._retired.add(version_id)
            self._forget_retired()

    def version_ids(self) -> list[str]:
        return [version_id for version_id in self._versions if version_id not in self._retired]

    def submit(self, request: SampleRequest) -> None:
        self._check(request)
        room = self.max_length - len(request.prompt)
        self._requests[request.request_id] = _Sampling(
            request,
            SystemRandom().randrange(2**63) if request.params.seed is None else request.params.seed & (2**64 - 1),
            room if request.params.max_tokens is None else request.params.max_tokens,
            [_Sequence([], []) for _ in range(request.num_samples)],
        )

    def cancel(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._forget_retired()

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Finished]:
        """Every sequence gains up to 16 tokens."""
        time.sleep(self.pause)
        finished = []
        for sampling in list(self._requests.values()):
            weights = self._weights(sampling.request.version_id)
            for number, sequence in enumerate(sampling.sequences):
                for _ in range(_TURN):
                    if sequence.stop_reason is None:
                        self._extend(sampling, number, sequence, weights)
            if sampling.done:
                del self._requests[sampling.request.request_id]
                finished.append(
                    Finished(sampling.request.request_id, _result(sampling, weights, self._trainer.vocab_size))
                )
        self._forget_retired()
        return finished

    def _add(self, version_id: str, weights: FloatArray) -> None:
        if version_id in self._versions:
            raise InvalidInputError("version_id", version_id, "a name that no other version has")
        self._versions[version_id] = weights

    def _weights(self, version_id: str | None) -> FloatArray:
        return np.zeros(SIZE, np.float32) if version_id is None else self._versions[version_id]

    def _forget_retired(self) -> None:
        used = {sampling.request.version_id for sampling in self._requests.values()}
        for version_id in self._retired - used:
            del self._versions[version_id]
        self._retired &= used

    def _check(self, request: SampleRequest) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is under way already")
        if request.version_id is not None and request.version_id not in self.version_ids():
            raise InvalidInputError("version_id", request.version_id, "a published version")
        prompt, vocab_size = request.prompt, self._trainer.vocab_size
        if not 0 < len(prompt) < self.max_length:
            raise InvalidInputError("prompt", f"{len(prompt)} tokens", f"1 to {self.max_length - 1}")
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise InvalidInputError("prompt", f"{prompt.min()} to {prompt.max()}", f"token ids in [0, {vocab_size})")
        if len(prompt) + (request.params.max_tokens or 0) > self.max_length:
            room = self.max_length - len(prompt)
            raise InvalidInputError("max_tokens", request.params.max_tokens, f"at most {room} after this prompt")

    def _extend(self, sampling: _Sampling, number: int, sequence: _Sequence, weights: FloatArray) -> None:
        request, params = sampling.request, sampling.request.params
        position = len(request.prompt) + len(sequence.tokens) - 1
        last = sequence.tokens[-1] if sequence.tokens else int(request.prompt[-1])
        candidates = (last * 7 + position * 5 + np.arange(_CANDIDATES) * 11 + 3) % self._trainer.vocab_size
        candidates[0] = self.end_token
        lp = logprobs(weights, features(np.array(last), candidates, np.array(position)))
        scores = lp
        if params.temperature > 0:
            noise = np.random.default_rng([sampling.seed, number, position]).gumbel(size=_CANDIDATES)
            scores = lp / params.temperature + noise
        best = int(scores.argmax())
        sequence.tokens.append(int(candidates[best]))
        sequence.logprobs.append(float(lp[best]))
        if self._stops(params, sequence.tokens):
            sequence.stop_reason = "stop"
        elif len(sequence.tokens) >= sampling.limit:
            sequence.stop_reason = "length"

    def _stops(self, params: SamplingParams, tokens: list[int]) -> bool:
        ends = (self.end_token, *params.stop_tokens) if params.stop_at_eos else params.stop_tokens
        text = "".join(f"{token} " for token in tokens) if params.stop_strings else ""
        return tokens[-1] in ends or any(stop in text for stop in params.stop_strings)


def _result(sampling: _Sampling, weights: FloatArray, vocab_size: int) -> SampleResult:
    request, k = sampling.request, sampling.request.topk_prompt_logprobs
    sequences = [
        SampledSequence(np.array(s.tokens, np.int64), np.array(s.logprobs, np.float32), s.stop_reason or "length")
        for s in sampling.sequences
    ]
    before, after = request.prompt[:-1], request.prompt[1:]
    prompt_logprobs = top = None
    if request.prompt_logprobs:
        lp = logprobs(weights, features(before, after, np.arange(len(before))))
        prompt_logprobs = np.concatenate([[np.nan], lp]).astype(np.float32)
    if k > 0:
        top = _top(weights, request.prompt, min(k, vocab_size))
    return SampleResult(sequences, prompt_logprobs, top)


def _top(weights: FloatArray, prompt: IntArray, k: int) -> TopLogprobs:
    """The k likeliest of the first k + 64 tokens; nothing precedes position 0, so its row is NaN."""
    choices = np.arange(k + 64)
    positions = np.arange(len(prompt) - 1)
    lp = logprobs(weights, features(prompt[:-1, None], choices[None], positions[:, None]))
    order = np.argsort(-lp, axis=1, kind="stable")[:, :k]
    token_ids = np.concatenate([np.zeros((1, k), np.int64), order])
    values = np.concatenate([np.full((1, k), np.nan), np.take_along_axis(lp, order, axis=1)])
    return TopLogprobs(token_ids, values.astype(np.float32))
