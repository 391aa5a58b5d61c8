"""Tinker's losses: sums of terms over tokens, each a function of the log-probabilities of the targets.

They work on flat tensors, so that one call can evaluate the tokens of many sequences and tenants. In the formulas:

    lp = log p_θ(target), (n,) for n tokens, or (n, K) with K targets a token
    w = "weights"; A = "advantages"; q = "logprobs", the log-probabilities when the tokens were sampled
    r = exp(lp − q); [lo, hi] = ["clip_low_threshold", "clip_high_threshold"]; β = "beta"

A token with A = 0 (w = 0 for cross_entropy) adds exactly 0 to loss and gradient, even where r overflows: prompts carry
q = 0 and A = 0, and 0·∞ would be NaN. ``dro`` is the exception, its quadratic term has no mask. Where A ≠ 0, overflow
of r shows as infinity or NaN in loss or gradient, except in ``cispo``, which clamps r and takes no gradient of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError

__all__ = ["TOKEN_LOSSES", "TokenLoss", "coefficients", "get_loss", "resolve_config"]

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class TokenLoss:
    """One loss: the inputs that a datum must have for it, its configuration, and its computation.

    ``terms`` and ``diagnostics`` take lp and a mapping that holds every name in ``inputs`` and every key of ``config``
    as a tensor that broadcasts to lp's shape. A config value may differ between tokens, if one call has several tenants
    or if a datum gives it as one of its ``optional_inputs``. A loss that is not
    ``pointwise`` also gets ``"sequence"``, int64 (n,): the index, counted from 0, of the sequence a token belongs to.
    """

    name: str
    inputs: tuple[str, ...]  # inputs that each datum must have besides its targets
    optional_inputs: tuple[str, ...]  # inputs that it may have: "weights" (absent: 1), or config values by token
    config: Mapping[str, float]  # the allowed keys and their defaults
    pointwise: bool  # dL/dlp of a token depends on that token's lp alone
    allows_topk: bool  # lp may be (n, K)
    terms: Callable[[Tensor, Inputs], Tensor]  # differentiable in lp and of its shape; the loss is their sum
    diagnostics: Callable[[Tensor, Inputs], dict[str, float]]  # of one item; "name:reduction", finite if lp and q are


def get_loss(name: str) -> TokenLoss:
    if name in _NOT_IMPLEMENTED:
        raise UnsupportedError(f"loss {name!r} is not implemented: {_NOT_IMPLEMENTED[name]}")
    if name not in TOKEN_LOSSES:
        raise UnknownNameError("loss", name, TOKEN_LOSSES)
    return TOKEN_LOSSES[name]


def resolve_config(loss: TokenLoss, config: Mapping[str, object]) -> dict[str, float]:
    """Return the defaults of ``loss``, overridden by the checked values of ``config``."""
    resolved = dict(loss.config)
    for key, value in config.items():
        if key not in loss.config:
            raise UnknownNameError(f"config key of loss {loss.name}", key, loss.config or ("none",))
        resolved[key] = _finite_number(f"loss_config.{key}", value)
    if "beta" in resolved and resolved["beta"] < 0:
        raise InvalidInputError("loss_config.beta", resolved["beta"], "0 or more")
    if "clip_low_threshold" in resolved and resolved["clip_low_threshold"] > resolved["clip_high_threshold"]:
        low, high = resolved["clip_low_threshold"], resolved["clip_high_threshold"]
        raise InvalidInputError("loss_config.clip_low_threshold", low, f"at most clip_high_threshold, which is {high}")
    return resolved


def coefficients(loss: TokenLoss, lp: Tensor, inputs: Inputs) -> Tensor:
    """Return dL/dlp, float32 and of lp's shape. Works under ``torch.no_grad`` and does not touch lp's own graph."""
    with torch.enable_grad():
        lp = lp.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss.terms(lp, inputs).sum(), lp)
    return gradient.float()


def _finite_number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInputError(field, value, "a finite number")
    try:
        number = float(value)
    except OverflowError:  # an int too large for a float
        number = math.inf
    if not math.isfinite(number):
        raise InvalidInputError(field, value, "a finite number")
    return number


# --- terms ------------------------------------------------------------------------------------------------------------


def _cross_entropy(lp: Tensor, inputs: Inputs) -> Tensor:
    """Return −w·lp, where w is 1 if no weights are given."""
    weights = inputs.get("weights", torch.ones_like(lp))
    return torch.where(weights != 0, -weights * lp, 0.0)


def _importance_sampling(lp: Tensor, inputs: Inputs) -> Tensor:
    """Return −r·A, with r = exp(lp − q)."""
    return -torch.exp(_log_ratio(lp, inputs)) * inputs["advantages"]


def _ppo(lp: Tensor, inputs: Inputs) -> Tensor:
    """Return −min(r·A, clamp(r, lo, hi)·A), with r = exp(lp − q)."""
    return _clipped_objective(torch.exp(_log_ratio(lp, inputs)), inputs)


def _cispo(lp: Tensor, inputs: Inputs) -> Tensor:
    """Return −c·lp·A with c = stopgrad(clamp(r, lo, hi)) and r = exp(lp − q)."""
    clipped_ratio = _clamp(torch.exp(_log_ratio(lp.detach(), inputs)), inputs)
    advantages = inputs["advantages"]
    return torch.where(advantages != 0, -clipped_ratio * lp * advantages, 0.0)


def _dro(lp: Tensor, inputs: Inputs) -> Tensor:
    """Return −(lp·A − ½·β·(lp − q)²)."""
    return -(lp * inputs["advantages"] - 0.5 * inputs["beta"] * (lp - inputs["logprobs"]) ** 2)


def _gspo(lp: Tensor, inputs: Inputs) -> Tensor:
    """Return −min(s·A, clamp(s, lo, hi)·A) with s = exp(ℓ + lp − stopgrad(lp)); ℓ is its sequence's mean of lp − q."""
    # lp − lp.detach() in its own brackets is exactly 0; ℓ + lp would round ℓ to the precision of lp
    log_ratio = _sequence_log_ratio(lp.detach(), inputs) + (lp - lp.detach())
    return _clipped_objective(torch.exp(torch.where(inputs["advantages"] != 0, log_ratio, 0.0)), inputs)


def _log_ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    """Return lp − q, and 0 where A = 0. The mask is applied before exp, whose derivative could overflow otherwise."""
    return torch.where(inputs["advantages"] != 0, lp - inputs["logprobs"], 0.0)


def _clamp(ratio: Tensor, inputs: Inputs) -> Tensor:
    return torch.clamp(ratio, inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def _clipped_objective(ratio: Tensor, inputs: Inputs) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clamp(ratio, inputs) * advantages)


def _sequence_log_ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    """Return ℓ for each token, (n,): the mean of lp − q over its sequence's tokens with ``sequence_ratio_mask`` ≠ 0.

    A sequence whose mask is 0 everywhere has ℓ = 0, that is ratio 1. Each sequence is summed separately, in the order
    of its tokens, so that tokens of other sequences (and their NaN) cannot affect it, and results are reproducible.
    """
    sequence = inputs["sequence"]
    counted = (inputs["sequence_ratio_mask"] != 0).expand_as(lp)
    order = torch.argsort(sequence, stable=True)
    order = order[counted[order]]
    sizes = torch.bincount(sequence[order], minlength=len(torch.bincount(sequence)))
    means = lp.new_zeros(len(sizes))
    for index, part in enumerate(torch.split((lp - inputs["logprobs"])[order], sizes.tolist())):
        if len(part) > 0:
            means[index] = part.mean()
    return means[sequence]


# --- diagnostics ------------------------------------------------------------------------------------------------------

# e^50 ≈ 5·10²¹: a reported ratio stops there, so that it and its mean stay finite in float32.
_LOG_RATIO_CAP = 50.0


def _no_diagnostics(lp: Tensor, inputs: Inputs) -> dict[str, float]:
    return {}


def _ratio_diagnostics(name: str, lp: Tensor, inputs: Inputs) -> dict[str, float]:
    """Return, over tokens with A ≠ 0, the k1 estimate of KL(sampling ‖ current policy), and mean and maximum of r."""
    log_ratio = _log_ratio(lp.detach(), inputs)[_active(lp, inputs)]
    ratio = _capped_exp(log_ratio)
    return {
        f"{name}_kl_div:mean": _mean(-log_ratio),
        f"{name}_ratio:mean": _mean(ratio),
        f"{name}_ratio:max": _max(ratio),
    }


def _ppo_diagnostics(lp: Tensor, inputs: Inputs) -> dict[str, float]:
    clipped = _clipping_binds(_capped_exp(_log_ratio(lp.detach(), inputs)), inputs)
    fraction = _mean(clipped[_active(lp, inputs)])
    return _ratio_diagnostics("ppo", lp, inputs) | {"ppo_clipped_fraction:mean": fraction}


def _cispo_diagnostics(lp: Tensor, inputs: Inputs) -> dict[str, float]:
    ratio = _capped_exp(_log_ratio(lp.detach(), inputs))
    fraction = _mean((ratio != _clamp(ratio, inputs))[_active(lp, inputs)])
    return _ratio_diagnostics("cispo", lp, inputs) | {"cispo_clipped_fraction:mean": fraction}


def _gspo_diagnostics(lp: Tensor, inputs: Inputs) -> dict[str, float]:
    """Return diagnostics. Ratio and clipped fraction are over sequences that have a token with A ≠ 0.

    A sequence counts as clipped if one of its tokens is.
    """
    lp = lp.detach()
    active = _active(lp, inputs)
    ratio = _capped_exp(_sequence_log_ratio(lp, inputs))
    sequence = inputs["sequence"]
    clipped = torch.unique(sequence[active & _clipping_binds(ratio, inputs)])
    present, position = torch.unique(sequence[active], return_inverse=True)
    sequence_ratio = ratio.new_zeros(len(present))
    sequence_ratio[position] = ratio[active]  # all tokens of a sequence write the same value
    return {
        "gspo_kl_div:mean": _mean(-_log_ratio(lp, inputs)[active]),
        "gspo_ratio:mean": _mean(sequence_ratio),
        "gspo_ratio:max": _max(sequence_ratio),
        "gspo_clipped_fraction:mean": len(clipped) / len(present) if len(present) > 0 else 0.0,
    }


def _active(lp: Tensor, inputs: Inputs) -> Tensor:
    return (inputs["advantages"] != 0).expand_as(lp)


def _clipping_binds(ratio: Tensor, inputs: Inputs) -> Tensor:
    """Return True where min(r·A, clamp(r, lo, hi)·A) takes the clamped side, so that the token has no gradient."""
    advantages = inputs["advantages"]
    too_high = (advantages > 0) & (ratio > inputs["clip_high_threshold"])
    too_low = (advantages < 0) & (ratio < inputs["clip_low_threshold"])
    return too_high | too_low


def _capped_exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(max=_LOG_RATIO_CAP))


def _mean(values: Tensor) -> float:
    return float(values.float().mean()) if len(values) > 0 else 0.0


def _max(values: Tensor) -> float:
    return float(values.max()) if len(values) > 0 else 0.0


# --- the registry -----------------------------------------------------------------------------------------------------

_CLIP = ("clip_low_threshold", "clip_high_threshold")

TOKEN_LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(
        name="cross_entropy",
        inputs=(),
        optional_inputs=("weights",),
        config={},
        pointwise=True,
        allows_topk=True,
        terms=_cross_entropy,
        diagnostics=_no_diagnostics,
    ),
    "importance_sampling": TokenLoss(
        name="importance_sampling",
        inputs=("logprobs", "advantages"),
        optional_inputs=(),
        config={},
        pointwise=True,
        allows_topk=False,
        terms=_importance_sampling,
        diagnostics=partial(_ratio_diagnostics, "importance_sampling"),
    ),
    "ppo": TokenLoss(
        name="ppo",
        inputs=("logprobs", "advantages"),
        optional_inputs=_CLIP,
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        pointwise=True,
        allows_topk=False,
        terms=_ppo,
        diagnostics=_ppo_diagnostics,
    ),
    "cispo": TokenLoss(
        name="cispo",
        inputs=("logprobs", "advantages"),
        optional_inputs=_CLIP,
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        pointwise=True,
        allows_topk=False,
        terms=_cispo,
        diagnostics=_cispo_diagnostics,
    ),
    "dro": TokenLoss(
        name="dro",
        inputs=("logprobs", "advantages"),
        optional_inputs=(),
        config={"beta": 0.05},
        pointwise=True,
        allows_topk=False,
        terms=_dro,
        diagnostics=partial(_ratio_diagnostics, "dro"),
    ),
    "gspo": TokenLoss(
        name="gspo",
        inputs=("logprobs", "advantages", "sequence_ratio_mask"),
        optional_inputs=_CLIP,
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        pointwise=False,
        allows_topk=False,
        terms=_gspo,
        diagnostics=_gspo_diagnostics,
    ),
}

# Names of the protocol that are known but not implemented, and why.
_NOT_IMPLEMENTED: Mapping[str, str] = {
    "stable_reinforce": "its objective is not published; importance_sampling, ppo and cispo are the nearest",
    "custom": "it names no loss by itself; a server knows the one whose loss_id create_custom_loss returned",
}
