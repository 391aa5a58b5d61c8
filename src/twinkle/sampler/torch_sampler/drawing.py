"""From logits to tokens: one uniform number picks a token by the inverse of the cumulative distribution.

Shapes: M rows, V vocabulary, D draws a row, k likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.model.decoder.transfer import to_device
from twinkle.sampler.types import TopLogprobs

# A draw takes about so many times the memory of its logits: copies in float64, their sums, their order.
MEMORY_OF_A_DRAW = 8
_CHUNK = 256  # of the vocabulary
_COLDEST = 1e-30  # below this a float32 temperature would be zero; the distribution is a point mass long before


@dataclass(frozen=True)
class Draw:
    """One token to draw; ``temperature=0`` takes the likeliest. ``top_k < 1``: off. ``top``: so many of the likeliest
    tokens are named beside it."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float
    top: int = 0

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_k >= 1 or self.top_p < 1)


@dataclass(frozen=True)
class Drawn:
    """A token and its log-probability under the tempered distribution over the whole vocabulary.

    Greedy: under the untempered one. Not ``finite``: the logits hold NaN or infinity, and the rest means nothing.
    ``top``: one row of the likeliest under the same distribution.
    """

    token: int
    logprob: float
    finite: bool
    top: TopLogprobs | None = None


@dataclass(frozen=True)
class DrawnRows:
    """What was drawn, still on the device."""

    tops: Sequence[int]  # how many of the likeliest tokens each row names
    values_3M: Tensor  # tokens, log-probabilities, whether finite; float64 holds them all
    top_2Mk: Tensor | None  # tokens and log-probabilities

    @property
    def tokens(self) -> Tensor:
        """(M,)"""
        return self.values_3M[0].long()


@dataclass(frozen=True)
class DrawPlan:
    """How the tokens of some rows are drawn, ready on the device for one pass or several."""

    settings_M3: Tensor  # divisor of the logits, top_k, top_p; float64
    plain: Tensor | slice | None  # rows that draw from the whole distribution
    truncated: Tensor | slice | None  # rows that draw from part of it; the others take the likeliest
    tops: Sequence[int]

    @classmethod
    def of(cls, draws: Sequence[Draw], device: torch.device) -> "DrawPlan":
        # The log-probabilities of greedy rows are those of the untempered distribution.
        settings = [(divisor(draw.temperature or 1.0), draw.top_k, draw.top_p) for draw in draws]
        plain = [row for row, draw in enumerate(draws) if draw.temperature > 0 and not draw.truncated]
        truncated = [row for row, draw in enumerate(draws) if draw.truncated]
        return cls(
            to_device(torch.tensor(settings, dtype=torch.float64), device),
            _rows(plain, len(draws), device),
            _rows(truncated, len(draws), device),
            [draw.top for draw in draws],
        )

    def draw(self, logits_MV: Tensor, uniform_M1: Tensor, choices: int) -> DrawnRows:
        """One draw a row. ``choices``: token ids from here on are never drawn, though they have a probability."""
        # The highest logit becomes 0 before the division: no temperature is low enough to overflow.
        shifted_MV = logits_MV - logits_MV.amax(1, keepdim=True)
        logprobs_MV = shifted_MV.div_(self.settings_M3[:, :1].float()).log_softmax(1)
        tokens_M = logprobs_MV[:, :choices].argmax(1)
        if self.plain is not None:
            weights = logprobs_MV[self.plain, :choices].exp()
            tokens_M[self.plain] = pick(weights, uniform_M1[self.plain]).squeeze(1)
        if self.truncated is not None:
            weights = logprobs_MV[self.truncated, :choices].exp()
            chosen = _from_nucleus(weights, uniform_M1[self.truncated], self.settings_M3[self.truncated])
            tokens_M[self.truncated] = chosen.squeeze(1)
        logprobs_M = logprobs_MV.gather(1, tokens_M.unsqueeze(1)).squeeze(1)
        # NaN anywhere in a row is NaN everywhere after the softmax; so is a row without one finite logit.
        values_3M = torch.stack([tokens_M.double(), logprobs_M.double(), (~logprobs_MV[:, 0].isnan()).double()])
        return DrawnRows(self.tops, values_3M, self._top(logprobs_MV[:, :choices]))

    def _top(self, logprobs_MV: Tensor) -> Tensor | None:
        widest = max(self.tops)
        if not widest:
            return None
        top = logprobs_MV.topk(widest, sorted=True)
        return torch.stack([top.indices.double(), top.values.double()])


def draw_tokens(logits_MV: Tensor, draws: Sequence[Draw], choices: int) -> DrawnRows:
    """One pass alone."""
    uniform_M1 = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64)[:, None]
    plan = DrawPlan.of(draws, logits_MV.device)
    return plan.draw(logits_MV, to_device(uniform_M1, logits_MV.device), choices)


def collect(parts: Sequence[DrawnRows]) -> list[Drawn]:
    """Off the device, all at once where nobody asked for the likeliest."""
    tokens, logprobs, finite = torch.cat([part.values_3M for part in parts], dim=1).tolist()
    tops = [top for part in parts for top in _tops(part)]
    return list(map(Drawn, map(int, tokens), logprobs, map(bool, finite), tops))


def pick(weights_MV: Tensor, uniform_MD: Tensor) -> Tensor:
    """(M, D): the first place where the running sum of weights exceeds u times their total.

    Sums of chunks first (fp32 inside a chunk, float64 along them), then inside one chunk: running sums over the whole
    vocabulary in float64 would take most of the time of a draw.
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
    # Sums in another order may end a little lower: whoever wants more than all of it gets the last of it.
    last_MD = steps_MDK.argmax(2)
    step_MD = torch.searchsorted(steps_MDK, wanted_MD.unsqueeze(2), right=True).squeeze(2).minimum(last_MD)
    return (chunk_MD * _CHUNK + step_MD).clamp_(max=size - 1)


def rows_at_once(chunk_rows: int, vocabulary: int, draws: int) -> int:
    """So many rows with so many draws each take the memory of ``chunk_rows`` rows of logits."""
    return max(1, chunk_rows * vocabulary // (MEMORY_OF_A_DRAW * max(vocabulary, draws * _CHUNK)))


def _from_nucleus(weights_MV: Tensor, uniform_M1: Tensor, settings_M3: Tensor) -> Tensor:
    """(M, 1): among the ``top_k`` likeliest, then the fewest of those that hold ``top_p`` of their probability."""
    size, device = weights_MV.shape[1], weights_MV.device
    top_k_M1, top_p_M1 = settings_M3[:, 1:2], settings_M3[:, 2:3]
    sorted_MV, ids_MV = weights_MV.double().sort(dim=1, descending=True, stable=True)
    sorted_MV.masked_fill_((torch.arange(size, device=device) >= top_k_M1) & (top_k_M1 >= 1), 0)
    sums_MV = sorted_MV.cumsum(1)
    beyond_MV = sums_MV - sorted_MV >= top_p_M1 * sums_MV[:, -1:]  # what is before a token is enough already
    beyond_MV[:, 0] = False
    sorted_MV.masked_fill_(beyond_MV, 0)
    return ids_MV.gather(1, pick(sorted_MV, uniform_M1))


def _rows(rows: list[int], of: int, device: torch.device) -> Tensor | slice | None:
    """An index, where possible a cheap one."""
    if not rows:
        return None
    return slice(None) if len(rows) == of else to_device(torch.tensor(rows), device)


def divisor(temperature: float) -> float:
    """Of logits whose highest is 0; at temperature 0 nothing else is left beside it."""
    return max(temperature, _COLDEST)


def _tops(part: DrawnRows) -> list[TopLogprobs | None]:
    if part.top_2Mk is None:
        return [None] * len(part.tops)
    token_ids, logprobs = part.top_2Mk.cpu().numpy()
    return [
        TopLogprobs(token_ids[row, None, :top].astype("int64"), logprobs[row, None, :top].astype("float32"))
        if top
        else None
        for row, top in enumerate(part.tops)
    ]
