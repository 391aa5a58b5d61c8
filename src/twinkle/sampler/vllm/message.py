"""The encoding of a drawn token, its log-probability and the likeliest tokens in the logits that vLLM sees.

Our own code draws tokens inside vLLM (see :mod:`twinkle.sampler.vllm.processor`). vLLM then picks the token with the
highest logit and reports ``log_softmax`` of the logits. So we replace the logits by a message:

- The drawn token has logit 0, and all others are lower.
- One other token, the carrier, has the drawn token's log-probability − 1 as its logit.
- The likeliest tokens, if asked for, each have their own log-probability − 64.
- All other tokens have −∞.

Softmax shifts all logits by the same amount, so the differences to the drawn token give back what was written. A
log-probability of the drawn token below −60 is written as −60. A message without a carrier means that the model's
logits were not finite.

Shapes: M rows, V vocabulary, k likeliest tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.sampler.torch_sampler.drawing import DrawnRows

# Tokens that vLLM must report for each position beside the likeliest ones: the drawn token and the carrier.
OVERHEAD = 2
_CARRIER = -1.0
_TOP = -64.0
_LOWEST = -60.0  # the lowest log-probability a message can hold, so that the carrier stays above the likeliest tokens


@dataclass(frozen=True)
class Told:
    """A decoded message: one drawn token. ``top``: the likeliest tokens with log-probabilities, likeliest first."""

    token: int
    logprob: float
    finite: bool
    top: tuple[tuple[int, float], ...]


def write(drawn: DrawnRows, logits_MV: Tensor) -> None:
    """Replace rows of logits by their messages, in place and without leaving the device."""
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
    """Decode the message of one position.

    reported: vLLM's log-probabilities for this position by token id, without infinite ones.
    """
    others = {other: value - reported[token] for other, value in reported.items() if other != token}
    carrier = max(others, key=others.__getitem__, default=None)
    if carrier is None or others[carrier] < _LOWEST + _CARRIER - 1:
        return Told(token, math.nan, False, ())
    logprob = min(0.0, others.pop(carrier) - _CARRIER)
    likeliest = [(other, min(0.0, value - _TOP)) for other, value in others.items()]
    # The drawn token's logit is 0, so it is missing among the likeliest; insert it by its log-probability.
    ranked = sorted([*likeliest, (token, logprob)], key=lambda entry: -entry[1])
    return Told(token, logprob, True, tuple(ranked[:top]))


def _free_token(taken_MK: Tensor) -> Tensor:
    """Return the lowest token id that each row does not use, (M, 1)."""
    candidates_C = torch.arange(taken_MK.shape[1] + 1, device=taken_MK.device)
    used_MC = (taken_MK.unsqueeze(2) == candidates_C).any(1)
    return used_MC.int().argmin(1, keepdim=True)
