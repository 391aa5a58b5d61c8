"""Log-probabilities of given targets and their gradient, without ever holding all logits.

The head walks over the rows in chunks: logits of a chunk, log-sum-exp, target log-probabilities, and, when the caller
can say dL/dlp for the chunk, the gradient with respect to hidden states and head LoRA right away. Memory is O(chunk ×
vocabulary) whatever the batch.

Shapes: T rows, C rows of a chunk, H hidden features, V vocabulary, K targets a row, G groups, R rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.model.grouped import Groups, add_grouped_mm, grouped_mm, grouped_outer
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
        chunks = self._chunks(len(hidden_TH))
        return torch.cat([self._chunk(hidden_TH, targets_TK, lora, rows).logprobs_CK for rows in chunks])

    def logprobs_and_gradient(
        self, hidden_TH: Tensor, targets_TK: Tensor, coefficients: Coefficients, lora: Sequence[HeadLora] = ()
    ) -> tuple[Tensor, Tensor]:
        """log p(target) and dL/dhidden; the gradient of head LoRA is added to its accumulators."""
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TH.device)
        gradient_TH = torch.empty_like(hidden_TH)
        for rows in self._chunks(len(hidden_TH)):
            chunk = self._chunk(hidden_TH, targets_TK, lora, rows)
            logprobs_TK[rows] = chunk.logprobs_CK
            coefficients_CK = coefficients(rows.start, rows.stop, chunk.logprobs_CK)
            dlogits_CV = self._dlogits(chunk, targets_TK[rows], coefficients_CK)
            gradient_CH = torch.mm(dlogits_CV, self.spec.weight_VH, out=gradient_TH[rows])
            for part, h_CR in zip(chunk.lora, chunk.inner, strict=True):
                _lora_gradient(part, h_CR, dlogits_CV, chunk.hidden_CH, gradient_CH)
        return logprobs_TK, gradient_TH

    def _chunks(self, rows: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_rows, rows)) for start in range(0, rows, self.chunk_rows)]

    def _chunk(self, hidden_TH: Tensor, targets_TK: Tensor, lora: Sequence[HeadLora], rows: slice) -> "_Chunk":
        hidden_CH = hidden_TH[rows]
        logits_CV = self._base_logits(hidden_CH)
        clipped = [part for each in lora if (part := _clip(each, rows.start, rows.stop)) is not None]
        inner, lora_CV = _lora_logits(clipped, hidden_CH, logits_CV.shape)
        kernels = self._use_kernels(logits_CV)
        if not kernels:
            logits_CV, lora_CV = self._finished(logits_CV, lora_CV), None
        norm_C1 = _log_normalizer(logits_CV, lora_CV) if kernels else torch.logsumexp(logits_CV, -1, keepdim=True)
        picked_CK = logits_CV.gather(1, targets_TK[rows])
        if lora_CV is not None:
            picked_CK = picked_CK + lora_CV.gather(1, targets_TK[rows])
        return _Chunk(hidden_CH, logits_CV, lora_CV, norm_C1, picked_CK - norm_C1, clipped, inner)

    def _use_kernels(self, logits_CV: Tensor) -> bool:
        return logits_CV.is_cuda and self.spec.scale == 1.0 and self.spec.softcap is None

    def _base_logits(self, hidden_CH: Tensor) -> Tensor:
        """(C, V) fp32; CUDA keeps the product's fp32 accumulator, elsewhere it is rounded to the compute type first."""
        spec = self.spec
        if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
            logits = torch.mm(hidden_CH, spec.weight_VH.t(), out_dtype=torch.float32)
            return logits if spec.bias_V is None else logits.add_(spec.bias_V)
        return F.linear(hidden_CH, spec.weight_VH, spec.bias_V).float()

    def _finished(self, logits_CV: Tensor, lora_CV: Tensor | None) -> Tensor:
        """LoRA, scale and cap applied, in place."""
        if lora_CV is not None:
            logits_CV += lora_CV
        if self.spec.scale != 1.0:
            logits_CV *= self.spec.scale
        if self.spec.softcap is not None:
            logits_CV.div_(self.spec.softcap).tanh_().mul_(self.spec.softcap)
        return logits_CV

    def _dlogits(self, chunk: "_Chunk", targets_CK: Tensor, coefficients_CK: Tensor) -> Tensor:
        """Σ_k c_k (onehot_k − p), (C, V), and back through cap and scale. Uses up the chunk's logits."""
        dtype = self.spec.weight_VH.dtype
        if self._use_kernels(chunk.logits_CV):
            from twinkle.model.head_kernels import logits_gradient

            return logits_gradient(chunk.logits_CV, chunk.lora_CV, chunk.norm_C1, targets_CK, coefficients_CK, dtype)
        slope_CV = None if self.spec.softcap is None else 1 - (chunk.logits_CV / self.spec.softcap) ** 2
        dlogits_CV = chunk.logits_CV.sub_(chunk.norm_C1).exp_().mul_(-coefficients_CK.sum(1, keepdim=True))
        for k in range(targets_CK.shape[1]):  # one target a row at a time: no two writes to one place
            dlogits_CV.scatter_add_(1, targets_CK[:, k : k + 1], coefficients_CK[:, k : k + 1])
        if slope_CV is not None:
            dlogits_CV *= slope_CV
        if self.spec.scale != 1.0:
            dlogits_CV *= self.spec.scale
        return dlogits_CV.to(dtype)


@dataclass(frozen=True)
class _Chunk:
    hidden_CH: Tensor
    logits_CV: Tensor
    lora_CV: Tensor | None  # what LoRA adds to the logits, where it has not been added yet
    norm_C1: Tensor
    logprobs_CK: Tensor
    lora: list[HeadLora]  # clipped to the chunk
    inner: list[Tensor]  # hidden A.T of each


def _log_normalizer(logits_CV: Tensor, lora_CV: Tensor | None) -> Tensor:
    from twinkle.model.head_kernels import log_normalizer  # needs Triton, which CUDA builds of torch bring

    return log_normalizer(logits_CV, lora_CV)


def _lora_logits(lora: Sequence[HeadLora], hidden_CH: Tensor, shape: torch.Size) -> tuple[list[Tensor], Tensor | None]:
    """hidden A.T of each segment, and what LoRA adds to the logits (C, V): zero in rows without LoRA."""
    if not lora:
        return [], None
    inner, whole = [], lora[0].bound.segment.stop - lora[0].bound.segment.start == shape[0]
    lora_CV = None if whole else torch.zeros(shape, dtype=hidden_CH.dtype, device=hidden_CH.device)
    for part in lora:
        segment = part.bound.segment
        rows = slice(segment.start, segment.stop)
        inner.append(grouped_mm(hidden_CH[rows], part.bound.a_GRI.transpose(1, 2), segment.groups))
        delta = grouped_mm(inner[-1], part.bound.b_GOR.transpose(1, 2), segment.groups)
        if lora_CV is None:
            return inner, delta
        lora_CV[rows] = delta
    return inner, lora_CV


def _lora_gradient(part: HeadLora, h_CR: Tensor, dlogits_CV: Tensor, hidden_CH: Tensor, gradient_CH: Tensor) -> None:
    assert part.da_GRI is not None and part.db_GOR is not None, "a gradient was asked for without a place to put it"
    segment = part.bound.segment
    rows, groups = slice(segment.start, segment.stop), segment.groups
    dlogits = dlogits_CV[rows]
    dh_CR = grouped_mm(dlogits, part.bound.b_GOR, groups)
    part.db_GOR.add_(grouped_outer(dlogits, h_CR, groups))
    part.da_GRI.add_(grouped_outer(dh_CR, hidden_CH[rows], groups))
    add_grouped_mm(gradient_CH[rows], dh_CR, part.bound.a_GRI, groups)


def _clip(lora: HeadLora, start: int, stop: int) -> HeadLora | None:
    """The part of a segment that lies in rows ``start``…``stop``, with rows counted from ``start``."""
    segment = lora.bound.segment
    low, high = max(segment.start, start), min(segment.stop, stop)
    if low >= high:
        return None
    ends = list(accumulate(segment.groups.sizes, initial=segment.start))
    overlaps = [min(after, high) - max(before, low) for before, after in pairwise(ends)]
    inside = [index for index, rows in enumerate(overlaps) if rows > 0]
    picked = slice(inside[0], inside[-1] + 1)
    groups = Groups.of(tuple(overlaps[picked]), lora.bound.a_GRI.device)
    bound = BoundLora(Segment(low - start, high - start, groups), lora.bound.a_GRI[picked], lora.bound.b_GOR[picked])
    if lora.da_GRI is None or lora.db_GOR is None:
        return HeadLora(bound)
    return HeadLora(bound, lora.da_GRI[picked], lora.db_GOR[picked])
