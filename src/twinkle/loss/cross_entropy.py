"""Cross entropy of the labels, from log-probabilities or from logits.

Shapes: B sequences, T positions, V vocabulary entries, H hidden width. m = (labels ≠ ignore_index), (B, T).

    sum:  Σ over m of −lp, with num_tokens = max(Σ m, 1)
    mean: the same divided by max(Σ m, 1), with num_tokens = 0
    dft:  −p·lp instead of −lp, where p = exp(lp) is a weight without gradient
"""

from typing import Any

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.extras import missing
from twinkle.loss.interface import IGNORE_INDEX, Inputs, Loss, LossOutput, Outputs
from twinkle.loss.token_logps import (
    chunked_logps_from_logits,
    label_mask,
    logps_from_logits,
    masked,
    masked_logps,
    required,
)

__all__ = ["ChunkedCrossEntropyLoss", "CrossEntropyLoss", "LigerFusedLinearCrossEntropyLoss"]


class CrossEntropyLoss(Loss):
    """Cross entropy from outputs["logps"], or from outputs["logits"] if there are no log-probabilities."""

    def __init__(self, ignore_index: int = IGNORE_INDEX, reduction: str = "mean", dft: bool = False) -> None:
        self.ignore_index = ignore_index
        self.reduction = _checked_reduction(reduction)
        self.dft = dft

    def __call__(self, inputs: Inputs, outputs: Outputs, **_: Any) -> LossOutput:
        mask_BT = label_mask(inputs, self.ignore_index)
        if outputs.get("logps") is not None:
            logps_BT = masked_logps(outputs, mask_BT)
        else:
            logps_BT = logps_from_logits(required(outputs, "logits"), inputs["labels"], mask_BT)
        return _reduced(logps_BT, mask_BT, self.reduction, self.dft)


class ChunkedCrossEntropyLoss(Loss):
    """Cross entropy from outputs["logps"] or, without them, from logits in chunks of ``chunk_size`` rows.

    Chunks avoid a float32 copy of all logits.
    """

    require_logits = True
    require_logps = False

    def __init__(
        self, chunk_size: int, ignore_index: int = IGNORE_INDEX, reduction: str = "mean", dft: bool = False
    ) -> None:
        if chunk_size < 1:
            raise InvalidInputError("chunk_size", chunk_size, "1 or more")
        self.chunk_size = chunk_size
        self.ignore_index = ignore_index
        self.reduction = _checked_reduction(reduction)
        self.dft = dft

    def __call__(self, inputs: Inputs, outputs: Outputs, **_: Any) -> LossOutput:
        mask_BT = label_mask(inputs, self.ignore_index)
        if outputs.get("logps") is not None:
            logps_BT = masked_logps(outputs, mask_BT)
        else:
            logits_BTV = required(outputs, "logits")
            logps_BT = chunked_logps_from_logits(logits_BTV, inputs["labels"], mask_BT, self.chunk_size)
            logps_BT = masked(logps_BT, mask_BT)
        return _reduced(logps_BT, mask_BT, self.reduction, self.dft)


class LigerFusedLinearCrossEntropyLoss(Loss):
    """Cross entropy fused with the output layer by Liger's kernel, which does not materialise the logits.

    A model that supports the task "fused_lm_ce" puts hidden states (B, T, H) into outputs["logits"] and its output
    layer, a module with ``weight`` and ``bias``, into outputs["lm_head"]. Without "lm_head" the loss is computed like
    :class:`CrossEntropyLoss`; label smoothing and softcap are refused then.
    """

    require_logits = True
    require_logps = False

    def __init__(
        self,
        ignore_index: int = IGNORE_INDEX,
        reduction: str = "sum",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        try:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Kernel
        except ImportError:
            raise missing("liger_kernel", "LigerFusedLinearCrossEntropyLoss") from None
        self.ignore_index = ignore_index
        self.reduction = _checked_reduction(reduction)
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self._kernel = Kernel(
            ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing, softcap=softcap
        )

    def __call__(self, inputs: Inputs, outputs: Outputs, **_: Any) -> LossOutput:
        head: Any = outputs.get("lm_head")  # the only output that is a module, not a tensor
        if head is None:
            return self._from_logps(inputs, outputs)
        hidden_BTH = required(outputs, "logits")
        labels_BT = inputs["labels"]
        total = self._kernel(
            head.weight, hidden_BTH.reshape(-1, hidden_BTH.shape[-1]), labels_BT.reshape(-1), head.bias
        )
        return _normalised(total, label_mask(inputs, self.ignore_index), self.reduction)

    def _from_logps(self, inputs: Inputs, outputs: Outputs) -> LossOutput:
        if self.label_smoothing != 0 or self.softcap is not None:
            raise InvalidInputError("outputs", sorted(outputs), "must hold 'lm_head' with label_smoothing or softcap")
        return CrossEntropyLoss(self.ignore_index, self.reduction)(inputs, outputs)


def _checked_reduction(reduction: str) -> str:
    if reduction not in ("mean", "sum"):
        raise InvalidInputError("reduction", reduction, "'mean' or 'sum'")
    return reduction


def _reduced(logps_BT: Tensor, mask_BT: Tensor, reduction: str, dft: bool) -> LossOutput:
    weight_BT = torch.exp(logps_BT.detach()) if dft else 1.0
    return _normalised(-(weight_BT * logps_BT).sum(), mask_BT, reduction)


def _normalised(total: Tensor, mask_BT: Tensor, reduction: str) -> LossOutput:
    num_tokens = mask_BT.sum().clamp(min=1)
    if reduction == "sum":
        return {"loss": total, "num_tokens": num_tokens}
    return {"loss": total / num_tokens, "num_tokens": 0}
