"""Policy-gradient losses: GRPO and its relatives.

Shapes: B sequences, T positions. m = (labels ≠ ignore_index), (B, T). In the formulas, for each token of m:

    lp = outputs["logps"]; A = advantages; d = clamp(lp − old_logps, −20, 20); r = exp(d)
    k = exp(ref_logps − lp) − (ref_logps − lp) − 1; H = outputs["entropies"]
    every loss adds β·k − entropy_coef·H to its own term

A token outside m adds exactly 0 to loss and gradient, whatever values it has. Without ``old_logps``, the tokens are
taken as samples of the present policy: r = 1, but r still has a gradient. Without ``advantages`` the loss is 0 (with a
warning in training), so that a model can be evaluated without them.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.loss.alignment import TokenValues, align_to_mask
from twinkle.loss.interface import IGNORE_INDEX, Inputs, Loss, LossOutput, Outputs, other_name
from twinkle.loss.token_logps import label_mask, masked, masked_logps, required, zero_of
from twinkle.utils.logger import note_once

__all__ = ["BNPOLoss", "CISPOLoss", "DRGRPOLoss", "GRPOLoss", "GSPOLoss", "SAPOLoss"]

LOG_RATIO_LIMIT = 20.0
EPSILON = 0.2  # the default of epsilon


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens of one batch: tensors (B, T), 0 outside the mask. ``log_ratio`` is (B, 1) if it is per sequence."""

    mask: Tensor
    logps: Tensor
    log_ratio: Tensor
    advantages: Tensor

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


class GRPOLoss(Loss):
    """GRPO: −min(r·A, clip(r, 1 − ε, 1 + ε_high)·A); mean over each sequence's tokens, then over sequences.

    The subclasses below change the term, the log ratio in it, or how terms are averaged (CISPO: term and average).
    ``clip_range`` is another name of ``epsilon``.
    """

    call_arguments: ClassVar[tuple[str, ...]] = ("advantages", "old_logps", "ref_logps")

    def __init__(
        self,
        epsilon: float = EPSILON,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        *,
        clip_range: float | None = None,
    ) -> None:
        for name, value in (("beta", beta), ("entropy_coef", entropy_coef)):
            if not is_finite(value):
                raise InvalidInputError(name, value, "a finite number")
        epsilon = other_name("clip_range", clip_range, "epsilon", epsilon, EPSILON)
        self.epsilon = checked_epsilon("epsilon", epsilon)
        self.epsilon_high = epsilon if epsilon_high is None else checked_epsilon("epsilon_high", epsilon_high)
        self.beta = beta
        self.entropy_coef = entropy_coef
        self.ignore_index = ignore_index
        self.require_entropy = entropy_coef != 0

    def __call__(
        self,
        inputs: Inputs,
        outputs: Outputs,
        *,
        old_logps: TokenValues | None = None,
        ref_logps: TokenValues | None = None,
        advantages: TokenValues | None = None,
        **_: Any,
    ) -> LossOutput:
        per_token = self._per_token(inputs, outputs, old_logps, ref_logps, advantages)
        if per_token is None:
            return _nothing_to_learn(outputs)
        return {"loss": self.aggregate(per_token, label_mask(inputs, self.ignore_index)), "num_tokens": 0}

    def policy_term(self, tokens: PolicyTokens) -> Tensor:
        """Return the loss's own term for each token, (B, T)."""
        ratio, advantages_BT = tokens.ratio, tokens.advantages
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        return -torch.minimum(ratio * advantages_BT, clipped * advantages_BT)

    def sequence_log_ratio(self, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the log ratio that the policy term uses: here that of each token."""
        return log_ratio_BT

    def aggregate(self, per_token_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Average over each sequence's tokens, then over sequences."""
        return (per_token_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)).mean()

    def _per_token(
        self,
        inputs: Inputs,
        outputs: Outputs,
        old_logps: TokenValues | None,
        ref_logps: TokenValues | None,
        advantages: TokenValues | None,
    ) -> Tensor | None:
        """Return the complete term of each token, (B, T) and 0 outside the mask; None without advantages."""
        if advantages is None:
            return None
        mask_BT = label_mask(inputs, self.ignore_index)
        logps_BT = masked_logps(outputs, mask_BT)
        dtype = logps_BT.dtype
        old_BT = logps_BT.detach() if old_logps is None else align_to_mask("old_logps", old_logps, mask_BT, dtype)
        log_ratio = self.sequence_log_ratio(logps_BT - old_BT, mask_BT)
        advantages_BT = align_to_mask("advantages", advantages, mask_BT, dtype)
        per_token_BT = self.policy_term(PolicyTokens(mask_BT, logps_BT, log_ratio, advantages_BT))
        if self.beta != 0:
            if ref_logps is None:
                raise InvalidInputError(
                    "ref_logps", None, f"log-probabilities of the reference, as beta is {self.beta}"
                )
            distance_BT = align_to_mask("ref_logps", ref_logps, mask_BT, dtype) - logps_BT
            per_token_BT = per_token_BT + self.beta * (torch.expm1(distance_BT) - distance_BT)
        if self.entropy_coef != 0:
            per_token_BT = per_token_BT - self.entropy_coef * masked(required(outputs, "entropies"), mask_BT)
        return torch.where(mask_BT, per_token_BT, 0.0)


class GSPOLoss(GRPOLoss):
    """GRPO with one ratio for each sequence: exp of the mean of lp − old_logps over its tokens."""

    def sequence_log_ratio(self, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return log_ratio_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)


class BNPOLoss(GRPOLoss):
    """GRPO's terms, averaged over all tokens of the batch."""

    def aggregate(self, per_token_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return per_token_BT.sum() / mask_BT.sum().clamp(min=1)


class DRGRPOLoss(GRPOLoss):
    """GRPO's terms; their sum is divided by B · max_completion_length: tokens of long answers count the same."""

    def __init__(
        self,
        epsilon: float = EPSILON,
        beta: float = 0.0,
        max_completion_length: int = 1024,
        epsilon_high: float | None = None,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        *,
        clip_range: float | None = None,
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, ignore_index, clip_range=clip_range)
        if max_completion_length < 1:
            raise InvalidInputError("max_completion_length", max_completion_length, "1 or more")
        self.max_completion_length = max_completion_length

    def aggregate(self, per_token_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return per_token_BT.sum() / (len(mask_BT) * self.max_completion_length)


class SAPOLoss(GRPOLoss):
    """SAPO: −(4/τ)·σ(τ·(r − 1))·A, with τ = tau_pos where A > 0 and tau_neg elsewhere; a soft gate, not a clip.

    ``tau`` sets both.
    """

    def __init__(
        self,
        epsilon: float = EPSILON,
        beta: float = 0.0,
        tau_pos: float = 1.0,
        tau_neg: float = 1.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        *,
        clip_range: float | None = None,
        tau: float | None = None,
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, ignore_index=ignore_index)
        epsilon = other_name("clip_range", clip_range, "epsilon", epsilon, EPSILON)
        tau_pos = other_name("tau", tau, "tau_pos", tau_pos, 1.0)
        tau_neg = other_name("tau", tau, "tau_neg", tau_neg, 1.0)
        if epsilon != EPSILON:  # accepted only because all losses of this family have it
            note_once("epsilon of SAPOLoss: no effect; SAPO does not clip, tau_pos and tau_neg shape it")
        for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
            if not (is_finite(tau) and tau > 0):
                raise InvalidInputError(name, tau, "a finite number above 0")
        self.tau_pos = tau_pos
        self.tau_neg = tau_neg

    def policy_term(self, tokens: PolicyTokens) -> Tensor:
        tau_BT = torch.full_like(tokens.advantages, self.tau_neg).masked_fill(tokens.advantages > 0, self.tau_pos)
        return -4 / tau_BT * torch.sigmoid(tau_BT * (tokens.ratio - 1)) * tokens.advantages


class CISPOLoss(GRPOLoss):
    """CISPO: −c·A·lp with c = min(r, 1 + ε_high) as a weight without gradient; the sum divided by the number of tokens.

    num_items_in_batch: the tokens of all micro-batches of one optimizer step; by default, the tokens of this batch.
    """

    call_arguments: ClassVar[tuple[str, ...]] = (*GRPOLoss.call_arguments, "num_items_in_batch")

    def __call__(
        self,
        inputs: Inputs,
        outputs: Outputs,
        *,
        old_logps: TokenValues | None = None,
        ref_logps: TokenValues | None = None,
        advantages: TokenValues | None = None,
        num_items_in_batch: float | Tensor | None = None,
        **_: Any,
    ) -> LossOutput:
        per_token = self._per_token(inputs, outputs, old_logps, ref_logps, advantages)
        if per_token is None:
            return _nothing_to_learn(outputs)
        if num_items_in_batch is None:
            num_items_in_batch = label_mask(inputs, self.ignore_index).sum().clamp(min=1)
        elif num_items_in_batch <= 0:
            raise InvalidInputError("num_items_in_batch", num_items_in_batch, "above 0")
        return {"loss": per_token.sum() / num_items_in_batch, "num_tokens": 0}

    def policy_term(self, tokens: PolicyTokens) -> Tensor:
        weight = tokens.ratio.detach().clamp(max=1 + self.epsilon_high)
        return -weight * tokens.advantages * tokens.logps


def is_finite(value: object) -> bool:
    """Return whether a value is a number, and finite. True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def checked_epsilon(name: str, epsilon: float) -> float:
    if not (is_finite(epsilon) and epsilon >= 0):
        raise InvalidInputError(name, epsilon, "a finite number, 0 or more")
    return epsilon


def _nothing_to_learn(outputs: Outputs) -> LossOutput:
    logps = required(outputs, "logps")
    if logps.requires_grad:
        warnings.warn("no advantages were given: the loss is 0 and nothing is learned from this batch", stacklevel=3)
    return {"loss": zero_of(logps), "num_tokens": 0}
