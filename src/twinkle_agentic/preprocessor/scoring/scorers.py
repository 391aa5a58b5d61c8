"""Scorers: each gives a number to every round, and says whether it passes.

A round is one reply of the assistant with the conversation before it. With log-probabilities of its tokens, Δ is the
log-probability after the conversation minus that of the same token in the reply alone: what the question tells about
the answer.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.scoring.backend import LLMBackend
from twinkle_agentic.preprocessor.utils import text_of

__all__ = ["ChrMinScorer", "ParaphraseScorer", "PassNScorer", "Round", "SIFDScorer", "Score", "Scorer"]

Messages = list[dict[str, Any]]
Judge = Callable[[Messages, str, str], bool]

_JUDGE_PROMPT = (
    "Here are a question, a reference answer and another answer. Do both answers come to the same result? "
    "Reply with one word, yes or no.\n\n# Question\n{question}\n\n# Reference answer\n{reference}\n\n"
    "# Other answer\n{answer}"
)
_PARAPHRASE_PROMPT = (
    "Rewrite this message in other words, in the same language. Keep its meaning and every detail. "
    "Reply with the rewritten message only.\n\n{question}"
)


@dataclass(frozen=True)
class Round:
    """One reply to score. ``prompt_ids`` are the last tokens of the conversation before it, ready for the reply."""

    context: Messages
    reply: str
    prompt_ids: list[int]
    reply_ids: list[int]

    @property
    def question(self) -> str:
        """Return the text of the last user's message."""
        return next((text_of(each) for each in reversed(self.context) if each.get("role") == "user"), "")


@dataclass(frozen=True)
class Score:
    value: float
    passed: bool


class Scorer(ABC):
    """Scores rounds with a backend. ``ScoreFilter`` calls it once for all rounds of a call."""

    @abstractmethod
    def __call__(self, rounds: Sequence[Round], backend: LLMBackend) -> list[Score]:
        """Return the score of each round, in the same order."""


class ChrMinScorer(Scorer):
    """The share of distinct tokens of the reply whose smallest Δ is > 0. A round passes below ``threshold``.

    A high share means that the question gives the answer away.
    """

    def __init__(self, threshold: float = 0.47) -> None:
        self.threshold = threshold

    def __call__(self, rounds: Sequence[Round], backend: LLMBackend) -> list[Score]:
        scores = []
        for each, deltas in zip(rounds, _deltas(rounds, backend), strict=True):
            smallest: dict[int, float] = {}
            for token, delta in zip(each.reply_ids[1:], deltas, strict=True):
                smallest[token] = min(delta, smallest.get(token, math.inf))
            value = sum(1 for delta in smallest.values() if delta > 0) / len(smallest)
            scores.append(Score(value, value < self.threshold))
        return scores


class SIFDScorer(Scorer):
    """exp(−mean Δ): the perplexity of the reply after its question divided by that of the reply alone.

    A round passes if the value is ``ifd_threshold`` or more; with None every round passes, and the value is recorded.
    """

    def __init__(self, ifd_threshold: float | None = None) -> None:
        self.ifd_threshold = ifd_threshold

    def __call__(self, rounds: Sequence[Round], backend: LLMBackend) -> list[Score]:
        scores = []
        for deltas in _deltas(rounds, backend):
            value = math.exp(-sum(deltas) / len(deltas))
            scores.append(Score(value, self.ifd_threshold is None or value >= self.ifd_threshold))
        return scores


class PassNScorer(Scorer):
    """The share of ``n`` sampled answers that agree with the reply.

    A round passes if at least ``min_passed`` answers agree, and at most ``max_passed`` (None: any number). judge: a
    function (conversation, reply, answer) → bool; None asks the backend's model.
    """

    def __init__(
        self,
        n: int = 4,
        judge: Judge | None = None,
        min_passed: int = 1,
        max_passed: int | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise InvalidInputError("n", n, "a number of samples ≥ 1")
        self.n = n
        self.judge = judge
        self.min_passed = min_passed
        self.max_passed = max_passed
        self.sampling_params = sampling_params or SamplingParams(max_tokens=1024, temperature=1.0)

    def __call__(self, rounds: Sequence[Round], backend: LLMBackend) -> list[Score]:
        asked = [each for each in rounds for _ in range(self.n)]
        answers = backend.chat_batch([each.context for each in asked], self.sampling_params)
        agreed = self._judged(asked, answers, backend)
        scores = []
        for number in range(len(rounds)):
            passed = sum(agreed[number * self.n : (number + 1) * self.n])
            enough = passed >= self.min_passed and (self.max_passed is None or passed <= self.max_passed)
            scores.append(Score(passed / self.n, enough))
        return scores

    def _judged(self, asked: Sequence[Round], answers: Sequence[str], backend: LLMBackend) -> list[bool]:
        if self.judge is not None:
            judge = self.judge
            return [judge(one.context, one.reply, answer) for one, answer in zip(asked, answers, strict=True)]
        questions = [
            _user(_JUDGE_PROMPT.format(question=one.question, reference=one.reply, answer=answer))
            for one, answer in zip(asked, answers, strict=True)
        ]
        verdicts = backend.chat_batch(questions, SamplingParams(max_tokens=8, temperature=0.0))
        return [verdict.strip().lower().startswith(("yes", "是")) for verdict in verdicts]


class ParaphraseScorer(Scorer):
    """How much the answer to a paraphrase of the question resembles the reply: the cosine of their embeddings.

    The backend's model writes the paraphrase and answers it. A round passes if the value is ``threshold`` or more.
    """

    def __init__(self, threshold: float = 0.7, sampling_params: SamplingParams | None = None) -> None:
        self.threshold = threshold
        self.sampling_params = sampling_params or SamplingParams(max_tokens=1024, temperature=0.0)

    def __call__(self, rounds: Sequence[Round], backend: LLMBackend) -> list[Score]:
        requests = [_user(_PARAPHRASE_PROMPT.format(question=each.question)) for each in rounds]
        paraphrases = backend.chat_batch(requests, self.sampling_params)
        asked = [_with_question(each.context, text) for each, text in zip(rounds, paraphrases, strict=True)]
        answers = backend.chat_batch(asked, self.sampling_params)
        vectors = backend.embeddings([*(each.reply for each in rounds), *answers])
        values = [_cosine(*pair) for pair in zip(vectors[: len(rounds)], vectors[len(rounds) :], strict=True)]
        return [Score(value, value >= self.threshold) for value in values]


def _deltas(rounds: Sequence[Round], backend: LLMBackend) -> list[list[float]]:
    """Return Δ of each token of each reply but the first, which nothing predicts in the reply alone."""
    count = len(rounds)
    both = [[*each.prompt_ids, *each.reply_ids] for each in rounds] + [each.reply_ids for each in rounds]
    logprobs = backend.prompt_logprobs_ids(both)
    deltas = []
    for each, conditional, alone in zip(rounds, logprobs[:count], logprobs[count:], strict=True):
        after = conditional[len(each.prompt_ids) + 1 :]
        deltas.append([_number(a) - _number(b) for a, b in zip(after, alone[1:], strict=True)])
    return deltas


def _number(logprob: float | None) -> float:
    assert logprob is not None, "only the first token of a text has no log-probability"
    return logprob


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _with_question(context: Messages, question: str) -> Messages:
    """Return the conversation up to its last user's message, with another text there."""
    last = max(place for place, message in enumerate(context) if message.get("role") == "user")
    return [*context[:last], {"role": "user", "content": question}]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    norms = math.sqrt(sum(a * a for a in one)) * math.sqrt(sum(b * b for b in other))
    return product / norms if norms else 0.0
