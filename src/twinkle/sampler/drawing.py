"""From logits to tokens: one uniform number picks a token by the inverse of the cumulative distribution.

Shapes: M draws, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_COLDEST = 1e-30  # below this a float32 temperature would be zero; the distribution is a point mass long before


@dataclass(frozen=True)
class Draw:
    """One token to draw; ``temperature=0`` takes the likeliest. ``top_k < 1``: off."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_k >= 1 or self.top_p < 1)


@dataclass(frozen=True)
class Drawn:
    """A token and its log-probability under the tempered distribution over the whole vocabulary.

    Greedy: under the untempered one. Not ``finite``: the logits hold NaN or infinity, and the rest means nothing.
    """

    token: int
    logprob: float
    finite: bool


def draw_tokens(logits_MV: Tensor, draws: Sequence[Draw], choices: int) -> list[Drawn]:
    """One draw a row. ``choices``: token ids from here on are never drawn, though they have a probability."""
    temperatures = [1.0 if draw.temperature == 0 else max(draw.temperature, _COLDEST) for draw in draws]
    temperature_M1 = torch.tensor(temperatures, dtype=torch.float32, device=logits_MV.device).unsqueeze(1)
    # The highest logit becomes 0 before the division: no temperature is low enough to overflow.
    logprobs_MV = (logits_MV - logits_MV.amax(1, keepdim=True)).div_(temperature_M1).log_softmax(1)
    tokens_M = logprobs_MV[:, :choices].argmax(1)
    for truncated in (False, True):
        rows = [row for row, draw in enumerate(draws) if draw.temperature > 0 and draw.truncated is truncated]
        if rows:
            index = torch.tensor(rows, device=logits_MV.device)
            probabilities = logprobs_MV[index, :choices].exp().double()
            chosen = [draws[row] for row in rows]
            tokens_M[index] = _from_nucleus(probabilities, chosen) if truncated else _pick(probabilities, chosen)
    logprobs_M = logprobs_MV.gather(1, tokens_M.unsqueeze(1)).squeeze(1)
    # NaN anywhere in a row is NaN everywhere after the softmax; so is a row without one finite logit.
    finite = (~logprobs_MV[:, 0].isnan()).tolist()
    return list(map(Drawn, tokens_M.tolist(), logprobs_M.tolist(), finite))


def _pick(weights_MV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The first place where the running sum of weights exceeds u times their total."""
    uniform_M1 = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=weights_MV.device)[:, None]
    sums_MV = weights_MV.cumsum(1)
    places_M1 = torch.searchsorted(sums_MV, uniform_M1 * sums_MV[:, -1:], right=True)
    return places_M1.squeeze(1).clamp_(max=weights_MV.shape[1] - 1)  # beyond the end only where the sums are NaN


def _from_nucleus(weights_MV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Among the ``top_k`` likeliest, then among the fewest of those that hold ``top_p`` of their probability."""
    size, device = weights_MV.shape[1], weights_MV.device
    counts = [min(draw.top_k, size) if draw.top_k >= 1 else size for draw in draws]
    top_k = torch.tensor(counts, device=device).unsqueeze(1)
    top_p = torch.tensor([draw.top_p for draw in draws], dtype=torch.float64, device=device).unsqueeze(1)
    sorted_MV, ids_MV = weights_MV.sort(dim=1, descending=True, stable=True)
    sorted_MV.masked_fill_(torch.arange(size, device=device) >= top_k, 0)
    sums_MV = sorted_MV.cumsum(1)
    beyond_MV = sums_MV - sorted_MV >= top_p * sums_MV[:, -1:]  # what is before a token is enough already
    beyond_MV[:, 0] = False
    sorted_MV.masked_fill_(beyond_MV, 0)
    return ids_MV.gather(1, _pick(sorted_MV, draws).unsqueeze(1)).squeeze(1)
