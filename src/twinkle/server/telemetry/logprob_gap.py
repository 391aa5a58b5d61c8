"""How far the trainer's log-probabilities are from those that the sampler gave when the tokens were drawn.

Policy losses correct for the distance; when it is large although the weights are the same, sampler and trainer do not
compute the same model, which is the most common silent fault of reinforcement learning. After the first optimizer step
on the same rollouts the distance is also that of the policy from where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinkle.model.csr import dense
from twinkle.model.types import Datum, FloatArray

__all__ = ["LogprobGap", "gap_of"]

SAMPLED = "logprobs"  # the loss input that holds the sampler's
_FURTHEST = 30.0  # nats: e³⁰ is as good as infinity, and finite


@dataclass(frozen=True)
class LogprobGap:
    """Over the tokens that were sampled: mean |Δ| and mean r − 1 − log r of r = p_trainer / p_sampler."""

    distance: float
    divergence: float


def gap_of(data: Sequence[Datum], logprobs: Sequence[FloatArray]) -> LogprobGap | None:
    """Of one pass. None if no datum has log-probabilities of a sampler.

    Clients write 0 where nothing was sampled, in prompts; tokens that the sampler was certain of go with them.
    """
    pairs = [(datum.extras[SAMPLED], lp) for datum, lp in zip(data, logprobs, strict=True) if SAMPLED in datum.extras]
    if not pairs or any(given.shape != lp.shape for given, lp in pairs):
        return None
    sampled = np.concatenate([dense(given).ravel() for given, _ in pairs])
    trained = np.concatenate([lp.ravel() for _, lp in pairs])
    mask = sampled != 0
    if not mask.any():
        return None
    ratio = np.clip(trained[mask].astype(np.float64) - sampled[mask], -_FURTHEST, _FURTHEST)
    return LogprobGap(float(np.abs(ratio).mean()), float((np.expm1(ratio) - ratio).mean()))
