"""Drawing tokens from logits: one uniform number picks a token by inverting the cumulative distribution.

Shapes: M rows, V vocabulary, D draws a row, k likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twinkle.model.decoder.transfer import HostCopy, to_device
from twinkle.model.types import IntArray
from twinkle.sampler.types import SamplingParams, TopLogprobs

# A draw takes about this many times the memory of its logits: float64 copies, running sums and sort order.
MEMORY_OF_A_DRAW = 8
_CHUNK = 256  # vocabulary entries that are summed first, see pick()
_COLDEST = 1e-30  # below this a float32 temperature would be zero; the distribution is a point mass long before


@dataclass(frozen=True)
class Penalties:
    """The penalties of one draw (see :class:`~twinkle.sampler.types.SamplingParams`), and the tokens before it.

    ``prompt``: the different tokens of the prompt. ``generated``: all tokens that were drawn so far, in any order.
    """

    repetition: float
    presence: float
    frequency: float
    prompt: IntArray
    generated: Sequence[int]

    @classmethod
    def for_draw(cls, params: SamplingParams, prompt: IntArray, generated: Sequence[int]) -> "Penalties | None":
        if not params.penalises:
            return None
        return cls(params.repetition_penalty, params.presence_penalty, params.frequency_penalty, prompt, generated)

    def apply(self, logits_V: Tensor) -> None:
        """Change the logits in place, in vLLM's order: repetition, frequency, presence."""
        tokens, counts = np.unique(np.asarray(self.generated, np.int64), return_counts=True)
        if self.repetition != 1.0:
            # A token of both is changed once: its new value is computed from the old one in both places.
            seen = to_device(torch.from_numpy(np.concatenate([self.prompt, tokens])), logits_V.device)
            values = logits_V[seen]
            logits_V[seen] = torch.where(values > 0, values / self.repetition, values * self.repetition)
        if len(tokens) and (self.presence or self.frequency):
            lower = torch.from_numpy(counts * self.frequency + self.presence).float()
            drawn = to_device(torch.from_numpy(tokens), logits_V.device)
            logits_V[drawn] -= to_device(lower, logits_V.device)


@dataclass(frozen=True)
class Draw:
    """How one token is drawn. ``temperature=0`` takes the likeliest token; ``top_k < 1`` switches top-k off.

    ``top``: how many of the likeliest tokens are reported beside the drawn one. ``min_p=0`` switches it off.
    """

    temperature: float
    top_k: int
    top_p: float
    uniform: float
    top: int = 0
    min_p: float = 0.0
    penalties: Penalties | None = None

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_k >= 1 or self.top_p < 1 or self.min_p > 0)

    @property
    def plain(self) -> bool:
        """Return whether there is no truncation, no penalty, and no list of likeliest tokens; it may be greedy."""
        return not self.truncated and not self.top and self.penalties is None


class Drawn(NamedTuple):
    """A token and its log-probability under the tempered distribution over the whole vocabulary, without penalties.

    A greedy draw (temperature 0) reports the log-probability under the untempered distribution. ``finite=False`` means
    that the logits hold NaN or infinity, and that the other fields are meaningless. ``top``: one row with the likeliest
    tokens under the same distribution. A tuple, because thousands are made between two passes, while the device waits.
    """

    token: int
    logprob: float
    finite: bool
    top: TopLogprobs | None = None


@dataclass(frozen=True)
class DrawnRows:
    """The drawn tokens of several rows, still on the device."""

    tops: Sequence[int]  # how many of the likeliest tokens each row reports
    values_3M: Tensor  # tokens, log-probabilities, whether finite; float64 holds them all
    top_2Mk: Tensor | None  # tokens and log-probabilities

    @property
    def tokens(self) -> Tensor:
        """Return the drawn token ids, (M,)."""
        return self.values_3M[0].long()


@dataclass(frozen=True)
class DrawPlan:
    """How the tokens of some rows are drawn, ready on the device for one pass or several."""

    settings_M5: Tensor  # divisor of the logits, top_k, top_p, min_p, whether greedy; float64
    plain: Tensor | slice | None  # rows that draw from the whole distribution
    truncated: Tensor | slice | None  # rows that draw from part of it (top_k, top_p, min_p); all others are greedy
    tops: Sequence[int]
    penalties: Sequence[tuple[int, Penalties]] = ()  # with the row that each belongs to

    @classmethod
    def for_draws(cls, draws: Sequence[Draw], device: torch.device) -> "DrawPlan":
        """Prepare one draw for each row, and copy its settings to the device."""
        # The log-probabilities of greedy rows are those of the untempered distribution.
        settings = [
            (divisor(draw.temperature or 1.0), draw.top_k, draw.top_p, draw.min_p, draw.temperature == 0)
            for draw in draws
        ]
        plain = [row for row, draw in enumerate(draws) if draw.temperature > 0 and not draw.truncated]
        truncated = [row for row, draw in enumerate(draws) if draw.truncated]
        return cls(
            to_device(torch.tensor(settings, dtype=torch.float64), device),
            _rows(plain, len(draws), device),
            _rows(truncated, len(draws), device),
            [draw.top for draw in draws],
            [(row, draw.penalties) for row, draw in enumerate(draws) if draw.penalties is not None],
        )

    def draw(self, logits_MV: Tensor, uniform_M1: Tensor, choices: int) -> DrawnRows:
        """Draw one token for each row.

        choices: token ids from this one on are never drawn, although they have a probability.
        """
        if logits_MV.is_cuda and self.truncated is None and not self.penalties and not any(self.tops):
            from twinkle.sampler.torch_sampler.drawing_kernels import draw_from_whole  # Triton comes with CUDA builds

            divisor_M, greedy_M = self.settings_M5[:, 0], self.settings_M5[:, 4]
            values_3M = draw_from_whole(logits_MV, divisor_M, greedy_M, uniform_M1[:, 0], choices)
            return DrawnRows(self.tops, values_3M, None)
        logprobs_MV = _tempered(logits_MV, self.settings_M5[:, :1])
        drawn_from_MV = logprobs_MV
        if self.penalties:
            drawn_from_MV = logprobs_MV.clone()
            for row, penalties in self.penalties:
                penalised_1V = logits_MV[row : row + 1].clone()
                penalties.apply(penalised_1V[0])
                drawn_from_MV[row] = _tempered(penalised_1V, self.settings_M5[row : row + 1, :1])[0]
        tokens_M = drawn_from_MV[:, :choices].argmax(1)
        if self.plain is not None:
            weights = drawn_from_MV[self.plain, :choices].exp()
            tokens_M[self.plain] = pick(weights, uniform_M1[self.plain]).squeeze(1)
        if self.truncated is not None:
            weights = drawn_from_MV[self.truncated, :choices].exp()
            chosen = _from_nucleus(weights, uniform_M1[self.truncated], self.settings_M5[self.truncated])
            tokens_M[self.truncated] = chosen.squeeze(1)
        logprobs_M = logprobs_MV.gather(1, tokens_M.unsqueeze(1)).squeeze(1)
        # A NaN anywhere in a row makes the whole row NaN after the softmax; so does a row without a finite logit.
        values_3M = torch.stack([tokens_M.double(), logprobs_M.double(), (~logprobs_MV[:, 0].isnan()).double()])
        return DrawnRows(self.tops, values_3M, self._top(logprobs_MV[:, :choices]))

    def _top(self, logprobs_MV: Tensor) -> Tensor | None:
        widest = max(self.tops)
        if not widest:
            return None
        top = logprobs_MV.topk(widest, sorted=True)
        return torch.stack([top.indices.double(), top.values.double()])


def draw_tokens(logits_MV: Tensor, draws: Sequence[Draw], choices: int) -> DrawnRows:
    """Draw one token for each row of logits, by the draw of that number; ``choices`` as in :meth:`DrawPlan.draw`."""
    uniform_M1 = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64)[:, None]
    plan = DrawPlan.for_draws(draws, logits_MV.device)
    return plan.draw(logits_MV, to_device(uniform_M1, logits_MV.device), choices)


@dataclass(frozen=True)
class PendingDraws:
    """Drawn tokens on their way to the host."""

    _values_3M: HostCopy
    _tops: Sequence[tuple[Sequence[int], HostCopy | None]]  # of each part: how many likeliest tokens per row, and which

    @classmethod
    def start(cls, parts: Sequence[DrawnRows]) -> "PendingDraws":
        """Start one copy to the host, and one more for each part that reports likeliest tokens."""
        values = [part.values_3M for part in parts]
        tops = [(part.tops, None if part.top_2Mk is None else HostCopy.start(part.top_2Mk)) for part in parts]
        return cls(HostCopy.start(values[0] if len(values) == 1 else torch.cat(values, dim=1)), tops)

    def drawn(self) -> list[Drawn]:
        """Wait for the copies, and return the drawn tokens of all rows."""
        tokens, logprobs, finite = self._values_3M.array().tolist()
        tops = [top for wanted, copy in self._tops for top in _tops(wanted, copy)]
        return list(map(Drawn._make, zip(map(int, tokens), logprobs, map(bool, finite), tops, strict=True)))


def collect(parts: Sequence[DrawnRows]) -> list[Drawn]:
    """Copy the drawn tokens to the host: one transfer, and one more for each part that reports likeliest tokens."""
    return PendingDraws.start(parts).drawn()


def pick(weights_MV: Tensor, uniform_MD: Tensor) -> Tensor:
    """Return, for each uniform number u, the first index where the running sum of weights exceeds u · total: (M, D).

    The chunk is found first, from the sums of chunks (fp32 inside a chunk, float64 across chunks), then the index
    inside that chunk. Running sums over the whole vocabulary in float64 would take most of the time of a draw.
    """
    size, whole = weights_MV.shape[1], weights_MV.shape[1] // _CHUNK * _CHUNK
    sums_MC = weights_MV[:, :whole].unflatten(1, (-1, _CHUNK)).sum(2).double()
    if whole < size:
        sums_MC = torch.cat([sums_MC, weights_MV[:, whole:].sum(1, keepdim=True).double()], 1)
    ends_MC = sums_MC.cumsum(1)
    wanted_MD = uniform_MD * ends_MC[:, -1:]
    chunk_MD = torch.searchsorted(ends_MC, wanted_MD, right=True).clamp_(max=sums_MC.shape[1] - 1)
    wanted_MD = wanted_MD - (ends_MC - sums_MC).gather(1, chunk_MD)
    places_MDK = chunk_MD.unsqueeze(2) * _CHUNK + torch.arange(_CHUNK, device=weights_MV.device)
    inside_MDK = weights_MV.gather(1, places_MDK.clamp(max=size - 1).flatten(1)).view(places_MDK.shape).double()
    steps_MDK = inside_MDK.masked_fill_(places_MDK >= size, 0).cumsum(2)
    # These sums are added in another order and may end slightly lower than the chunk's sum. If the wanted value lies
    # beyond their maximum, take the first index at which they reach it.
    last_MD = steps_MDK.argmax(2)
    step_MD = torch.searchsorted(steps_MDK, wanted_MD.unsqueeze(2), right=True).squeeze(2).minimum(last_MD)
    return (chunk_MD * _CHUNK + step_MD).clamp_(max=size - 1)


def rows_at_once(chunk_rows: int, vocabulary: int, draws: int) -> int:
    """Return how many rows with ``draws`` draws each fit into the memory of ``chunk_rows`` rows of logits."""
    return max(1, chunk_rows * vocabulary // (MEMORY_OF_A_DRAW * max(vocabulary, draws * _CHUNK)))


def _tempered(logits_MV: Tensor, divisor_M1: Tensor) -> Tensor:
    """Return the log-probabilities of logits / divisor."""
    # Shift the highest logit to 0 before the division, so that even very low temperatures cannot overflow.
    shifted_MV = logits_MV - logits_MV.amax(1, keepdim=True)
    return shifted_MV.div_(divisor_M1.float()).log_softmax(1)


def _from_nucleus(weights_MV: Tensor, uniform_M1: Tensor, settings_M5: Tensor) -> Tensor:
    """Draw one token for each row, (M, 1), from the nucleus.

    Tokens with less than ``min_p`` of the likeliest one's probability are left out first. The nucleus is the fewest of
    the ``top_k`` likeliest tokens that together hold ``top_p`` of their probability.
    """
    size, device = weights_MV.shape[1], weights_MV.device
    top_k_M1, top_p_M1, min_p_M1 = settings_M5[:, 1:2], settings_M5[:, 2:3], settings_M5[:, 3:4]
    sorted_MV, ids_MV = weights_MV.double().sort(dim=1, descending=True, stable=True)
    sorted_MV.masked_fill_(sorted_MV < min_p_M1 * sorted_MV[:, :1], 0)
    sorted_MV.masked_fill_((torch.arange(size, device=device) >= top_k_M1) & (top_k_M1 >= 1), 0)
    sums_MV = sorted_MV.cumsum(1)
    beyond_MV = sums_MV - sorted_MV >= top_p_M1 * sums_MV[:, -1:]  # the tokens before this one already hold top_p
    beyond_MV[:, 0] = False
    sorted_MV.masked_fill_(beyond_MV, 0)
    return ids_MV.gather(1, pick(sorted_MV, uniform_M1))


def _rows(rows: list[int], of: int, device: torch.device) -> Tensor | slice | None:
    """Return an index for these rows out of ``of``: a slice where all are taken, None where none is."""
    if not rows:
        return None
    return slice(None) if len(rows) == of else to_device(torch.tensor(rows), device)


def divisor(temperature: float) -> float:
    """Return the number that divides logits whose highest is 0: the temperature, but at least 1e-30.

    At temperature 0 only the highest logit keeps any weight.
    """
    return max(temperature, _COLDEST)


def _tops(wanted: Sequence[int], copy: HostCopy | None) -> list[TopLogprobs | None]:
    if copy is None:
        return [None] * len(wanted)
    token_ids, logprobs = copy.array()
    return [
        TopLogprobs(token_ids[row, None, :top].astype("int64"), logprobs[row, None, :top].astype("float32"))
        if top
        else None
        for row, top in enumerate(wanted)
    ]
