"""Drawing the next tokens of a whole batch inside vLLM, with the noise and truncation of the torch sampler.

A token is a function of the logits and of one number, a hash of the request's seed, the sample and the position. The
numbers of a batch are computed at once on the host, because positions are known there before the device has computed
the logits; so nothing here waits for the device, and vLLM can prepare the next step meanwhile. Settings stay on the
device until the batch has other requests. This module does not import vLLM.

Shapes: M rows of a batch, V vocabulary, k likeliest tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle.model.decoder.transfer import to_device
from twinkle.model.types import IntArray
from twinkle.sampler.noise import Words, uniforms, words
from twinkle.sampler.torch_sampler.drawing import DrawnRows, DrawPlan, Penalties, divisor

_KEY = "twinkle_draw"
_GREEDY, _PLAIN, _TRUNCATED = range(3)
# Logits that are drawn from at once. vLLM reserves memory for its own drawing from the largest batch that it may run,
# which is enough for so many. A draw from a part of the distribution sorts the logits, and needs twice as much.
_ELEMENTS = 2**25
_SORTED_ELEMENTS = 2**24


@dataclass(frozen=True)
class DrawSettings:
    """How one sample is drawn; sent along with its request. ``top``: how many of the likeliest tokens to report."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    sample: int
    top: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def to_extra_args(self) -> dict[str, object]:
        """Return the settings as the entry of a request that vLLM passes on to its workers."""
        return {_KEY: list(astuple(self))}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, list[float]] | None) -> "DrawSettings | None":
        """Read the settings of a request. Return None for a request that is not ours, such as vLLM's own warm-up."""
        values = (extra_args or {}).get(_KEY)
        return None if values is None else cls(*values)  # type: ignore[arg-type]  # as to_extra_args wrote them

    @cached_property
    def row(self) -> tuple[float, float, float, float, bool]:
        """Return the divisor of the logits, top_k, top_p, min_p and whether greedy, as :class:`DrawPlan` has them."""
        # The log-probabilities of a greedy draw are those of the untempered distribution.
        return (divisor(self.temperature or 1.0), self.top_k, self.top_p, self.min_p, self.temperature <= 0)

    @cached_property
    def kind(self) -> int:
        """Return how the token is chosen: the likeliest one, or drawn from all or from a part of the vocabulary."""
        if self.temperature <= 0:
            return _GREEDY
        return _TRUNCATED if self.top_k >= 1 or self.top_p < 1 or self.min_p > 0 else _PLAIN

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def penalties(self, prompt: IntArray, generated: Sequence[int]) -> Penalties:
        """Return the penalties of the next draw, after these tokens."""
        return Penalties(self.repetition_penalty, self.presence_penalty, self.frequency_penalty, prompt, generated)


@dataclass(frozen=True)
class DrawnBatch:
    """What was drawn, on the device.

    ``ids`` (M, 1 + k): the drawn token of each row, then the likeliest tokens; int64. ``logprobs``: theirs, float32;
    that of the drawn token is NaN if the logits of its row were not finite.
    """

    ids: Tensor
    logprobs: Tensor

    @property
    def tokens(self) -> Tensor:
        """Return the drawn tokens, (M,)."""
        return self.ids[:, 0]


@dataclass(frozen=True)
class _Part:
    """Some consecutive rows of a batch and how they are drawn."""

    rows: slice
    plan: DrawPlan


class BatchDrawing:
    """Draws the tokens of one batch after another. Keeps what is on the device while the rows stay the same."""

    def __init__(self) -> None:
        self._rows: list[DrawSettings] = []
        self.penalised: list[int] = []  # the rows with penalties
        self._seeds_M: Words = words()
        self._samples_M: Words = words()
        self._parts: list[_Part] = []  # made by the first draw from these rows

    def set_rows(self, rows: list[DrawSettings]) -> None:
        """Say how each row of the next batch is drawn. This does almost nothing if the rows are the same as before."""
        if rows == self._rows:
            return
        self._rows = rows
        self.penalised = [number for number, row in enumerate(rows) if row.penalises]
        self._seeds_M = words(*[row.seed for row in rows])
        self._samples_M = words(*[row.sample for row in rows])
        self._parts = []

    def draw(self, logits_MV: Tensor, positions_M: IntArray, penalties: Mapping[int, Penalties]) -> DrawnBatch:
        """Draw one token for each row.

        positions: how many tokens of each sample exist already. penalties: of the rows :attr:`penalised`, by row.
        """
        if not self._parts:
            self._prepare(logits_MV)
        numbers_M = uniforms(self._seeds_M, self._samples_M, positions_M.astype(np.uint64))
        uniform_M1 = to_device(torch.from_numpy(numbers_M)[:, None], logits_MV.device)
        drawn = [_draw(part, logits_MV, uniform_M1, penalties) for part in self._parts]
        width = max(each.top_2Mk.shape[2] if each.top_2Mk is not None else 0 for each in drawn)
        columns = [_columns(each, width) for each in drawn]
        return DrawnBatch(torch.cat([ids for ids, _ in columns]), torch.cat([logprobs for _, logprobs in columns]))

    def _prepare(self, logits_MV: Tensor) -> None:
        """Copy the settings of the rows to the device."""
        settings_M5 = np.array([row.row for row in self._rows])
        kinds_M = np.array([row.kind for row in self._rows])
        tops = [row.top for row in self._rows]
        elements = _SORTED_ELEMENTS if (kinds_M == _TRUNCATED).any() else _ELEMENTS
        at_once = max(1, elements // logits_MV.shape[1])
        device = logits_MV.device
        for rows in (slice(start, start + at_once) for start in range(0, len(tops), at_once)):
            plan = DrawPlan(
                to_device(torch.from_numpy(settings_M5[rows]), device),
                _index(kinds_M[rows] == _PLAIN, device),
                _index(kinds_M[rows] == _TRUNCATED, device),
                tops[rows],
            )
            self._parts.append(_Part(rows, plan))


def _draw(part: _Part, logits_MV: Tensor, uniform_M1: Tensor, penalties: Mapping[int, Penalties]) -> DrawnRows:
    first, plan = part.rows.start, part.plan
    own = [(row - first, penalties[row]) for row in sorted(penalties) if first <= row < part.rows.stop]
    if own:
        plan = replace(plan, penalties=own)
    return plan.draw(logits_MV[part.rows].float(), uniform_M1[part.rows], logits_MV.shape[1])


def _index(chosen_M: NDArray[np.bool_], device: torch.device) -> Tensor | slice | None:
    """Return an index for the chosen rows: a slice where all are chosen, None where none is."""
    if not chosen_M.any():
        return None
    return slice(None) if chosen_M.all() else to_device(torch.from_numpy(np.flatnonzero(chosen_M)), device)


def _columns(drawn: DrawnRows, width: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities of the drawn token and of ``width`` likeliest ones; −inf where not asked for."""
    tokens_M, logprobs_M, finite_M = drawn.values_3M
    ids = tokens_M.long().unsqueeze(1)
    logprobs = torch.where(finite_M.bool(), logprobs_M, torch.nan).float().unsqueeze(1)
    if drawn.top_2Mk is not None:
        ids = torch.cat([ids, drawn.top_2Mk[0].long()], 1)
        logprobs = torch.cat([logprobs, drawn.top_2Mk[1].float()], 1)
    missing = 1 + width - ids.shape[1]
    if missing:
        ids = torch.nn.functional.pad(ids, (0, missing))
        logprobs = torch.nn.functional.pad(logprobs, (0, missing), value=-torch.inf)
    return ids, logprobs
