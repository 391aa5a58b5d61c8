"""Preference losses: compare a chosen answer with a rejected one.

Shapes: B sequences, chosen and rejected in turn: [chosen, rejected, chosen, …]; P = B/2 pairs; T positions.
m = (labels ≠ ignore_index), (B, T). In the formulas, for each pair:

    Σc, Σr = sums of lp over m of the chosen and of the rejected sequence; avg_c, avg_r = the same divided by Σ m
    Δc = Σc − ref Σc; Δr = Σr − ref Σr, with the reference model's log-probabilities
    NLL = −lp, mean over all tokens of all chosen sequences

The terms of the losses are means over pairs, except NLL, which is a mean over tokens.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.loss.alignment import TokenValues, align_to_mask
from twinkle.loss.interface import IGNORE_INDEX, Inputs, Loss, LossOutput, Outputs, other_name
from twinkle.loss.token_logps import label_mask, masked_logps, zero_of

__all__ = ["CPOLoss", "DPOLoss", "ORPOLoss", "SimPOLoss"]

LOSS_TYPES = ("hinge", "ipo", "kto_pair", "sigmoid")


@dataclass(frozen=True)
class Pairs:
    """Sums of log-probabilities and numbers of tokens, for chosen and for rejected sequences; all (P,)."""

    chosen: Tensor
    rejected: Tensor
    chosen_count: Tensor
    rejected_count: Tensor

    @property
    def chosen_mean(self) -> Tensor:
        return self.chosen / self.chosen_count.clamp(min=1)

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_count.clamp(min=1)

    @property
    def chosen_nll(self) -> Tensor:
        """Return the negative log-likelihood as a scalar: the mean over all chosen tokens."""
        return -self.chosen.sum() / self.chosen_count.sum().clamp(min=1)


@dataclass(frozen=True)
class ReferenceArguments:
    """The three ways to pass the reference model's log-probabilities; see :class:`DPOLoss`."""

    ref_outputs: Mapping[str, Any] | None
    ref_logps: TokenValues | None
    ref_chosen_logps: Any
    ref_rejected_logps: Any

    def sums(self, mask_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return the reference's sums for chosen and for rejected sequences, (P,) each; None if none were given."""
        logps = self.ref_logps
        if logps is None and self.ref_outputs is not None:
            logps = self.ref_outputs.get("logps")
            if logps is None:
                raise InvalidInputError("ref_outputs", sorted(self.ref_outputs), "must hold 'logps'")
        if logps is not None:
            sums_B = align_to_mask("ref_logps", logps, mask_BT, dtype).sum(-1)
            return sums_B[0::2], sums_B[1::2]
        if self.ref_chosen_logps is None and self.ref_rejected_logps is None:
            return None
        pairs = len(mask_BT) // 2
        return (
            _per_pair("ref_chosen_logps", self.ref_chosen_logps, pairs, mask_BT.device, dtype),
            _per_pair("ref_rejected_logps", self.ref_rejected_logps, pairs, mask_BT.device, dtype),
        )


def pairs_of(logps_BT: Tensor, mask_BT: Tensor) -> Pairs:
    """Sum the log-probabilities of each sequence and split them into pairs. ``logps_BT`` is 0 outside the mask."""
    if len(mask_BT) % 2 != 0:
        raise InvalidInputError("inputs", f"{len(mask_BT)} sequences", "an even number: chosen and rejected in turn")
    sums_B, counts_B = logps_BT.sum(-1), mask_BT.sum(-1)
    return Pairs(sums_B[0::2], sums_B[1::2], counts_B[0::2], counts_B[1::2])


class DPOLoss(Loss):
    """Direct preference optimization. With h = β·(Δc − Δr) and s = label_smoothing, the ``loss_type`` is one of

        "sigmoid":  −(1 − s)·log σ(h) − s·log σ(−h)
        "hinge":    max(0, 1 − h)
        "ipo":      (Δc − Δr − 1/(2β))²
        "kto_pair": 1 − σ(β·Δc) + σ(β·Δr)

    and sft_weight · NLL is added to each.

    The reference's log-probabilities are given as ``ref_logps`` (rows like logps), as ``ref_outputs`` that hold them
    (the result of forward_only), or as ``ref_chosen_logps`` and ``ref_rejected_logps`` (P,), which are sums. With
    ``reference_free``, the reference gives all answers the same probability. Otherwise, without a reference the loss is
    0 (with a warning in training), so that a model can be evaluated without one.
    """

    call_arguments: ClassVar[tuple[str, ...]] = ("ref_chosen_logps", "ref_logps", "ref_outputs", "ref_rejected_logps")

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        loss_type: str = "sigmoid",
        reference_free: bool = False,
        sft_weight: float = 0.0,
    ) -> None:
        if loss_type not in LOSS_TYPES:
            raise UnknownNameError("loss_type of DPOLoss", loss_type, LOSS_TYPES)
        if not 0 <= label_smoothing < 0.5:
            raise InvalidInputError("label_smoothing", label_smoothing, "from 0 to below 0.5")
        if label_smoothing > 0 and loss_type != "sigmoid":
            raise InvalidInputError("label_smoothing", label_smoothing, f"0 with loss_type {loss_type!r}")
        self.beta = _positive("beta", beta)
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.loss_type = loss_type
        self.reference_free = reference_free
        self.sft_weight = sft_weight

    def __call__(
        self,
        inputs: Inputs,
        outputs: Outputs,
        *,
        ref_outputs: Mapping[str, Any] | None = None,
        ref_logps: TokenValues | None = None,
        ref_chosen_logps: Any = None,
        ref_rejected_logps: Any = None,
        **_: Any,
    ) -> LossOutput:
        mask_BT = label_mask(inputs, self.ignore_index)
        logps_BT = masked_logps(outputs, mask_BT)
        pairs = pairs_of(logps_BT, mask_BT)
        given = ReferenceArguments(ref_outputs, ref_logps, ref_chosen_logps, ref_rejected_logps)
        reference = given.sums(mask_BT, logps_BT.dtype)
        if self.reference_free:
            reference = (torch.zeros_like(pairs.chosen), torch.zeros_like(pairs.rejected))
        if reference is None:
            if logps_BT.requires_grad:
                warnings.warn("no reference log-probabilities were given: the loss is 0", stacklevel=2)
            return {"loss": zero_of(outputs["logps"]), "num_tokens": 0}
        loss = self._per_pair_loss(pairs.chosen - reference[0], pairs.rejected - reference[1]).mean()
        if self.sft_weight != 0:
            loss = loss + self.sft_weight * pairs.chosen_nll
        return {"loss": loss, "num_tokens": 0}

    def _per_pair_loss(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return the loss of each pair from Δc and Δr, (P,)."""
        margin_P = chosen_P - rejected_P
        if self.loss_type == "ipo":
            return (margin_P - 1 / (2 * self.beta)) ** 2
        if self.loss_type == "kto_pair":
            return 1 - torch.sigmoid(self.beta * chosen_P) + torch.sigmoid(self.beta * rejected_P)
        if self.loss_type == "hinge":
            return F.relu(1 - self.beta * margin_P)
        h_P = self.beta * margin_P
        return -(1 - self.label_smoothing) * F.logsigmoid(h_P) - self.label_smoothing * F.logsigmoid(-h_P)


class SimPOLoss(Loss):
    """SimPO: −log σ(β·(avg_c − avg_r) − γ)."""

    def __init__(self, beta: float = 2.5, gamma: float = 0.5, ignore_index: int = IGNORE_INDEX) -> None:
        self.beta = _positive("beta", beta)
        self.gamma = gamma
        self.ignore_index = ignore_index

    def __call__(self, inputs: Inputs, outputs: Outputs, **_: Any) -> LossOutput:
        pairs = _read_pairs(inputs, outputs, self.ignore_index)
        margin_P = self.beta * (pairs.chosen_mean - pairs.rejected_mean) - self.gamma
        return {"loss": -F.logsigmoid(margin_P).mean(), "num_tokens": 0}


class CPOLoss(Loss):
    """CPO: −log σ(β·(Σc − Σr)) + bc_coef · NLL. ``cpo_alpha`` is another name of ``bc_coef``."""

    def __init__(
        self,
        beta: float = 0.1,
        bc_coef: float = 1.0,
        ignore_index: int = IGNORE_INDEX,
        *,
        cpo_alpha: float | None = None,
    ) -> None:
        self.beta = _positive("beta", beta)
        self.bc_coef = other_name("cpo_alpha", cpo_alpha, "bc_coef", bc_coef, 1.0)
        self.ignore_index = ignore_index

    def __call__(self, inputs: Inputs, outputs: Outputs, **_: Any) -> LossOutput:
        pairs = _read_pairs(inputs, outputs, self.ignore_index)
        preference = -F.logsigmoid(self.beta * (pairs.chosen - pairs.rejected)).mean()
        return {"loss": preference + self.bc_coef * pairs.chosen_nll, "num_tokens": 0}


class ORPOLoss(Loss):
    """ORPO: NLL − λ · mean of log σ(logodds(avg_c) − logodds(avg_r)), with logodds(x) = x − log(1 − eˣ)."""

    def __init__(self, lambda_orpo: float = 0.1, ignore_index: int = IGNORE_INDEX) -> None:
        self.lambda_orpo = lambda_orpo
        self.ignore_index = ignore_index

    def __call__(self, inputs: Inputs, outputs: Outputs, **_: Any) -> LossOutput:
        pairs = _read_pairs(inputs, outputs, self.ignore_index)
        ratio_P = _log_odds(pairs.chosen_mean) - _log_odds(pairs.rejected_mean)
        return {"loss": pairs.chosen_nll - self.lambda_orpo * F.logsigmoid(ratio_P).mean(), "num_tokens": 0}


def _read_pairs(inputs: Inputs, outputs: Outputs, ignore_index: int) -> Pairs:
    mask_BT = label_mask(inputs, ignore_index)
    return pairs_of(masked_logps(outputs, mask_BT), mask_BT)


def _log_odds(x: Tensor) -> Tensor:
    """Return x − log(1 − eˣ) for x ≤ 0. It is infinite at 0 (a certain answer), so x is clamped to just below 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    small = x > -math.log(2)  # each form is inaccurate on the other's side; where() keeps both finite there
    near_zero = torch.log(-torch.expm1(torch.where(small, x, -1.0)))
    far_below = torch.log1p(-torch.exp(torch.where(small, -1.0, x)))
    return x - torch.where(small, near_zero, far_below)


def _per_pair(field: str, values: Any, pairs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    if values is None:
        raise InvalidInputError(field, None, "given together: ref_chosen_logps and ref_rejected_logps")
    sums = torch.as_tensor(values, device=device, dtype=dtype).detach()
    if sums.shape != (pairs,):
        raise InvalidInputError(field, f"shape {tuple(sums.shape)}", f"one sum for each of the {pairs} pairs")
    return sums


def _positive(field: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise InvalidInputError(field, value, "a finite number above 0")
    return value
