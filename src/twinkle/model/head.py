"""Log-probabilities of given targets and their gradient, without ever holding all logits.

The head walks over the rows in chunks: logits of a chunk, log-sum-exp, target log-probabilities, and, when the caller can
say dL/dlp for the chunk, the gradient with respect to hidden states and head LoRA right away. Memory is
O(chunk × vocabulary) whatever the batch.

Shapes: T rows, C rows of a chunk, H hidden features, V vocabulary, K targets a row, G groups, R rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.model.grouped import Groups, grouped_mm, grouped_outer
from twinkle.model.lora import BoundLora, Segment

# (start, stop, lp_CK) → dL/dlp of these rows
Coefficients = Callable[[int, int, Tensor], Tensor]


@dataclass(frozen=True)
class HeadSpec:
    """How a model turns hidden states into logits: cap · tanh(scale · (h W.T + bias) / cap)."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class HeadLora:
    """Head LoRA of one segment and where its gradient is added up: da_GRI and db_GOR, fp32."""

    bound: BoundLora
    da_GRI: Tensor | None = None
    db_GOR: Tensor | None = None


class ChunkedHead:
    """Walks over hidden states in chunks of at most ``chunk_rows`` rows."""

    def __init__(self, spec: HeadSpec, chunk_rows: int) -> None:
        self.spec = spec
        self.chunk_rows = chunk_rows

    def logprobs(self, hidden_TH: Tensor, targets_TK: Tensor, lora: Sequence[HeadLora] = ()) -> Tensor:
        """log p(target), (T, K) fp32, without gradient."""
        parts = []
        for start, stop in self._chunks(len(hidden_TH)):
            chunk = self._chunk(hidden_TH, targets_TK, lora, start, stop)
            parts.append(chunk.logprobs_CK)
        return torch.cat(parts)

    def logprobs_and_gradient(
        self, hidden_TH: Tensor, targets_TK: Tensor, coefficients: Coefficients, lora: Sequence[HeadLora] = ()
    ) -> tuple[Tensor, Tensor]:
        """log p(target) and dL/dhidden; the gradient of head LoRA is added to its accumulators."""
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TH.device)
        gradient_TH = torch.empty_like(hidden_TH)
        for start, stop in self._chunks(len(hidden_TH)):
            chunk = self._chunk(hidden_TH, targets_TK, lora, start, stop)
            logprobs_TK[start:stop] = chunk.logprobs_CK
            coefficients_CK = coefficients(start, stop, chunk.logprobs_CK)
            gradient_TH[start:stop] = self._gradient(chunk, targets_TK[start:stop], coefficients_CK)
        return logprobs_TK, gradient_TH

    def _chunks(self, rows: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.chunk_rows, rows)) for start in range(0, rows, self.chunk_rows)]

    def _chunk(
        self, hidden_TH: Tensor, targets_TK: Tensor, lora: Sequence[HeadLora], start: int, stop: int
    ) -> "_Chunk":
        hidden_CH = hidden_TH[start:stop]
        logits_CV = self._base_logits(hidden_CH)
        clipped = [part for each in lora if (part := _clip(each, start, stop)) is not None]
        inner = []
        for part in clipped:
            rows = slice(part.bound.segment.start, part.bound.segment.stop)
            groups = part.bound.segment.groups
            h_CR = grouped_mm(hidden_CH[rows], part.bound.a_GRI.transpose(1, 2), groups)
            logits_CV[rows] += grouped_mm(h_CR, part.bound.b_GOR.transpose(1, 2), groups)
            inner.append(h_CR)
        if self.spec.scale != 1.0:
            logits_CV *= self.spec.scale
        if self.spec.softcap is not None:
            logits_CV = self.spec.softcap * torch.tanh_(logits_CV.div_(self.spec.softcap))
        norm_C1 = torch.logsumexp(logits_CV, -1, keepdim=True)
        logprobs_CK = logits_CV.gather(1, targets_TK[start:stop]) - norm_C1
        return _Chunk(hidden_CH, logits_CV, norm_C1, logprobs_CK, clipped, inner)

    def _base_logits(self, hidden_CH: Tensor) -> Tensor:
        """(C, V) in fp32; CUDA keeps the product's fp32 accumulator, elsewhere it is rounded to the compute type first."""
        spec = self.spec
        if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
            logits = torch.mm(hidden_CH, spec.weight_VH.t(), out_dtype=torch.float32)
            return logits if spec.bias_V is None else logits.add_(spec.bias_V)
        return F.linear(hidden_CH, spec.weight_VH, spec.bias_V).float()

    def _gradient(self, chunk: "_Chunk", targets_CK: Tensor, coefficients_CK: Tensor) -> Tensor:
        """dL/dhidden of a chunk, (C, H): dlogits = Σ_k c_k (onehot_k − p). Uses up the chunk's logits."""
        slope_CV = None
        if self.spec.softcap is not None:
            slope_CV = 1 - (chunk.logits_CV / self.spec.softcap) ** 2
        dlogits_CV = chunk.logits_CV.sub_(chunk.norm_C1).exp_().mul_(-coefficients_CK.sum(1, keepdim=True))
        for k in range(targets_CK.shape[1]):  # one target a row at a time: no two writes to one place
            column_C1 = targets_CK[:, k : k + 1]
            dlogits_CV.scatter_add_(1, column_C1, coefficients_CK[:, k : k + 1])
        if slope_CV is not None:
            dlogits_CV *= slope_CV
        if self.spec.scale != 1.0:
            dlogits_CV *= self.spec.scale
        dlogits_CV = dlogits_CV.to(self.spec.weight_VH.dtype)
        gradient_CH = dlogits_CV @ self.spec.weight_VH
        for part, h_CR in zip(chunk.lora, chunk.inner, strict=True):
            _lora_gradient(part, h_CR, dlogits_CV, chunk.hidden_CH, gradient_CH)
        return gradient_CH


@dataclass(frozen=True)
class _Chunk:
    hidden_CH: Tensor
    logits_CV: Tensor
    norm_C1: Tensor
    logprobs_CK: Tensor
    lora: list[HeadLora]  # clipped to the chunk
    inner: list[Tensor]  # hidden A.T of each


def _lora_gradient(part: HeadLora, h_CR: Tensor, dlogits_CV: Tensor, hidden_CH: Tensor, gradient_CH: Tensor) -> None:
    assert part.da_GRI is not None and part.db_GOR is not None, "a gradient was asked for without a place to put it"
    segment = part.bound.segment
    rows, groups = slice(segment.start, segment.stop), segment.groups
    dlogits = dlogits_CV[rows]
    dh_CR = grouped_mm(dlogits, part.bound.b_GOR, groups)
    part.db_GOR.add_(grouped_outer(dlogits, h_CR, groups))
    part.da_GRI.add_(grouped_outer(dh_CR, hidden_CH[rows], groups))
    gradient_CH[rows] += grouped_mm(dh_CR, part.bound.a_GRI, groups)


def _clip(lora: HeadLora, start: int, stop: int) -> HeadLora | None:
    """The part of a segment that lies in rows ``start``…``stop``, with rows counted from ``start``."""
    segment = lora.bound.segment
    low, high = max(segment.start, start), min(segment.stop, stop)
    if low >= high:
        return None
    ends = list(accumulate(segment.groups.sizes, initial=segment.start))
    overlaps = [min(after, high) - max(before, low) for before, after in zip(ends, ends[1:], strict=False)]
    inside = [index for index, rows in enumerate(overlaps) if rows > 0]
    picked = slice(inside[0], inside[-1] + 1)
    groups = Groups.of(tuple(overlaps[picked]), lora.bound.a_GRI.device)
    bound = BoundLora(Segment(low - start, high - start, groups), lora.bound.a_GRI[picked], lora.bound.b_GOR[picked])
    if lora.da_GRI is None or lora.db_GOR is None:
        return HeadLora(bound)
    return HeadLora(bound, lora.da_GRI[picked], lora.db_GOR[picked])
