"""The scores that a request asks for its prompt, and those computed so far."""

import numpy as np

from twinkle.errors import NonFiniteError
from twinkle.sampler.noise import alternative_uniforms
from twinkle.sampler.torch_sampler.scoring import Scores, Scoring
from twinkle.sampler.types import DrawnTokens, TopLogprobs
from twinkle.sampler.validation import CheckedRequest


class PromptScores:
    """The prompt scores of one request, filled in piece by piece.

    Row i of the model predicts token i + 1, so position 0 has no score and the last row is not used. ``logprobs`` (T,)
    and ``top`` (T, k) are indexed by position; ``targets`` (T − 1, K) and ``drawn`` (T − 1, k) begin with position 1.
    Each is None if the request does not ask for it.
    """

    def __init__(self, request: CheckedRequest) -> None:
        self._request = request
        length, top, draws = len(request.prompt), request.topk_prompt_logprobs, request.prompt_alt_tokens
        named = request.target_prompt_logprobs
        self.logprobs = np.full(length, np.nan, np.float32) if request.prompt_logprobs else None
        self.top = TopLogprobs(*_nothing(length, top)) if top else None
        self.targets = None if named is None else np.zeros(named.shape, np.float32)
        self.drawn = DrawnTokens(*_nothing(length - 1, draws)) if draws else None
        self.first = self._first()

    def _first(self) -> int:
        """Return the first position that is scored, or the prompt's length if none is."""
        named = self._request.target_prompt_logprobs
        begins = [len(self._request.prompt)]
        if self.logprobs is not None or self.top is not None:
            begins.append(self._last_n)
        if self.drawn is not None:
            begins.append(1)
        if named is not None:
            begins += [int(row) + 1 for row in np.flatnonzero((named >= 0).any(axis=1))[:1]]
        return min(begins)

    @property
    def _last_n(self) -> int:
        """Return the first position for ``logprobs`` and ``top``, which ``prompt_logprobs_last_n`` limits."""
        length, last_n = len(self._request.prompt), self._request.prompt_logprobs_last_n
        return 1 if last_n is None else min(length, max(1, length - last_n))

    def scoring(self, start: int, stop: int) -> Scoring | None:
        """Return the scores to compute for rows ``start``…``stop``, or None if there are none."""
        request = self._request
        rows = self._rows(start, stop)
        if not rows:
            return None
        columns = []
        if self.logprobs is not None:
            columns.append(request.prompt[rows.start + 1 : rows.stop + 1, None])
        if request.target_prompt_logprobs is not None:
            columns.append(request.target_prompt_logprobs[rows.start : rows.stop])
        positions = np.arange(rows.start + 1, rows.stop + 1, dtype=np.uint64)
        draws = np.arange(request.prompt_alt_tokens, dtype=np.uint64)
        return Scoring(
            rows.start - start,
            np.concatenate(columns, axis=1) if columns else np.empty((len(rows), 0), np.int64),
            request.topk_prompt_logprobs,
            request.params.temperature,
            alternative_uniforms(request.seed, positions[:, None], draws[None, :]),
        )

    def absorb(self, start: int, stop: int, scores: Scores) -> None:
        """Store the scores that were computed for :meth:`scoring` of the same rows."""
        found = (scores.logprobs, scores.top.logprobs[:, :1], scores.drawn.logprobs)
        if not all(np.isfinite(values).all() for values in found):
            raise NonFiniteError("log-probabilities of the prompt are NaN or infinite under this version")
        rows = self._rows(start, stop)
        by_row = slice(rows.start, rows.stop)
        limited = max(0, self._last_n - 1 - rows.start)  # how many of these rows lie before the last n
        by_position = slice(rows.start + 1 + limited, rows.stop + 1)
        if self.logprobs is not None:
            self.logprobs[by_position] = scores.logprobs[limited:, 0]
        if self.targets is not None:
            self.targets[by_row] = scores.logprobs[:, 0 if self.logprobs is None else 1 :]
        if self.top is not None:
            self.top.token_ids[by_position] = scores.top.token_ids[limited:]
            self.top.logprobs[by_position] = scores.top.logprobs[limited:]
        if self.drawn is not None:
            self.drawn.tokens[by_row] = scores.drawn.tokens
            self.drawn.logprobs[by_row] = scores.drawn.logprobs

    def _rows(self, start: int, stop: int) -> range:
        """Return those of the rows ``start``…``stop`` (exclusive) that are scored."""
        return range(max(start, self.first - 1), min(stop, len(self._request.prompt) - 1))


def _nothing(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and log-probabilities of empty cells: token 0 with −∞."""
    return np.zeros((rows, columns), np.int64), np.full((rows, columns), -np.inf, np.float32)
