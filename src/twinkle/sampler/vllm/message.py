"""How a drawn token leaves vLLM.

Tokens are drawn by our own code inside vLLM (see :mod:`twinkle.sampler.vllm.processor`), which then only has to pick
the likeliest token and report ``log_softmax`` of what it was given. So it is given a message. The drawn token has logit
0, and everything else stands below it: first a carrier, some other token whose logit is the drawn token's
log-probability − 1, then the likeliest tokens, if asked for, each at its own log-probability − 64. Softmax moves all of
them by the same amount, so differences to the drawn token are what was written. No carrier: the logits were not finite.

Shapes: M rows, V vocabulary, k likeliest tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.sampler.torch_sampler.drawing import DrawnRows

# What vLLM must report for each position beside the likeliest tokens: the drawn one and the carrier.
OVERHEAD = 2
_CARRIER = -1.0
_TOP = -64.0
_LOWEST = -60.0  # log-probability of the rarest draw that can be told: keeps the carrier above the likeliest tokens


@dataclass(frozen=True)
class Told:
    """A drawn token as it arrived; ``top``: the likeliest tokens with their log-probabilities, likeliest first."""

    token: int
    logprob: float
    finite: bool
    top: tuple[tuple[int, float], ...]


def write(drawn: DrawnRows, logits_MV: Tensor) -> None:
    """Replace the rows by their messages. Stays on the device."""
    tokens_M1 = drawn.values_3M[0].long().unsqueeze(1)
    logprobs_M1 = drawn.values_3M[1].float().unsqueeze(1).clamp(min=_LOWEST)
    finite_M1 = drawn.values_3M[2].bool().unsqueeze(1)
    logits_MV.fill_(-math.inf)
    taken_MK = tokens_M1
    if drawn.top_2Mk is not None:
        top_Mk = drawn.top_2Mk[0].long()
        logits_MV.scatter_(1, top_Mk, torch.where(finite_M1, drawn.top_2Mk[1].float() + _TOP, -math.inf))
        taken_MK = torch.cat([tokens_M1, top_Mk], dim=1)
    logits_MV.scatter_(1, _free_token(taken_MK), torch.where(finite_M1, logprobs_M1 + _CARRIER, -math.inf))
    logits_MV.scatter_(1, tokens_M1, 0.0)


def read(token: int, reported: Mapping[int, float], top: int) -> Told:
    """``reported``: what vLLM says of one position, log-probabilities by token id, infinite ones left out."""
    others = {other: value - reported[token] for other, value in reported.items() if other != token}
    carrier = max(others, key=others.__getitem__, default=None)
    if carrier is None or others[carrier] < _LOWEST + _CARRIER - 1:
        return Told(token, math.nan, False, ())
    logprob = min(0.0, others.pop(carrier) - _CARRIER)
    likeliest = [(other, min(0.0, value - _TOP)) for other, value in others.items()]
    # The drawn token stands at 0 and not among the likeliest; if it is one of them, this is its place.
    ranked = sorted([*likeliest, (token, logprob)], key=lambda entry: -entry[1])
    return Told(token, logprob, True, tuple(ranked[:top]))


def _free_token(taken_MK: Tensor) -> Tensor:
    """(M, 1): the lowest token id that a row does not use."""
    candidates_C = torch.arange(taken_MK.shape[1] + 1, device=taken_MK.device)
    used_MC = (taken_MK.unsqueeze(2) == candidates_C).any(1)
    return used_MC.int().argmin(1, keepdim=True)
