"""Log-probabilities of given targets and their gradient, without ever holding all logits.

The head computes the rows in chunks: logits of a chunk, log-sum-exp, target log-probabilities and, when the caller can
compute dL/dlp for the chunk, also the gradient with respect to hidden states and head LoRA. Memory is O(chunk ×
vocabulary) for any batch size.

Shapes: T rows, C rows of a chunk, H hidden features, V vocabulary, K targets per row, M values per row (K, with
statistics 2 more, with logits V more), G groups, R rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.segments import BoundLora, Segment, add_lora, add_lora_gradient
from twinkle.model.decoder.products import linear, mm

# (start, stop, values_CM) → dL/dvalue of these rows
Coefficients = Callable[[int, int, Tensor], Tensor]

STATISTICS = 2  # columns after the log-probabilities: entropy, most likely token (as float32, which holds every id)


@dataclass(frozen=True)
class HeadSpec:
    """How a model makes logits of hidden states h: x = scale · (h W.T + bias); with a soft cap, cap · tanh(x / cap)."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class HeadQuery:
    """Options of the rows: whether to compute statistics and to return all logits, and the temperature."""

    statistics: bool = False
    sharpness_T1: Tensor | None = None  # 1 / temperature of each row, a factor on its logits; None: all 1
    logits: bool = False  # the last V values of each row

    @property
    def empty(self) -> bool:
        return not self.statistics and self.sharpness_T1 is None and not self.logits

    def for_rows(self, rows: slice) -> "HeadQuery":
        """Return the options of some of the rows."""
        return self if self.sharpness_T1 is None else replace(self, sharpness_T1=self.sharpness_T1[rows])


NOTHING_MORE = HeadQuery()


class HeadGradient(Protocol):
    """Adds up the gradient of the head's own weights, where these are trained."""

    def add(self, dlogits_CV: Tensor, hidden_CH: Tensor) -> None:
        """Add the part of a chunk: dlogits.T @ hidden to that of the weights, dlogits to that of the bias."""


class ChunkedHead:
    """The output head, computed in chunks of at most ``chunk_rows`` rows.

    ``gradient`` gets the gradient of the head's weights from :meth:`logprobs_and_gradient`; None: they are frozen.
    """

    def __init__(self, spec: HeadSpec, chunk_rows: int, gradient: HeadGradient | None = None) -> None:
        self.spec = spec
        self.chunk_rows = chunk_rows
        self.gradient = gradient

    @property
    def vocabulary(self) -> int:
        """Return how many logits a row has."""
        return len(self.spec.weight_VH)

    def logprobs(
        self,
        hidden_TH: Tensor,
        targets_TK: Tensor,
        lora: Sequence[BoundLora] = (),
        query: HeadQuery = NOTHING_MORE,
        between: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return log p(target) and, if the query asks for them, statistics: (T, M) fp32, without gradient.

        ``between`` is called before each chunk.
        """
        values: list[Tensor] = []
        for rows in self._chunks(len(hidden_TH)):
            if between is not None:
                between()
            values.append(self._chunk(hidden_TH, targets_TK, lora, query, rows).softmax.values_CM)
        return torch.cat(values)

    def logprobs_and_gradient(
        self,
        hidden_TH: Tensor,
        targets_TK: Tensor,
        coefficients: Coefficients,
        lora: Sequence[BoundLora] = (),
        query: HeadQuery = NOTHING_MORE,
        between: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the values of :meth:`logprobs`, and dL/dhidden. Add the gradient of head LoRA to ``lora``."""
        count = targets_TK.shape[1] + (STATISTICS if query.statistics else 0)
        count += self.vocabulary if query.logits else 0
        values_TM = torch.empty(len(targets_TK), count, dtype=torch.float32, device=hidden_TH.device)
        gradient_TH = torch.empty_like(hidden_TH)
        for rows in self._chunks(len(hidden_TH)):
            if between is not None:
                between()
            chunk = self._chunk(hidden_TH, targets_TK, lora, query, rows)
            values_TM[rows] = chunk.softmax.values_CM
            coefficients_CM = coefficients(rows.start, rows.stop, chunk.softmax.values_CM)
            dlogits_CV = chunk.softmax.gradient(coefficients_CM, self.spec.weight_VH.dtype)
            gradient_CH = mm(dlogits_CV, self.spec.weight_VH, out=gradient_TH[rows])
            if self.gradient is not None:
                self.gradient.add(dlogits_CV, chunk.hidden_CH)
            for part in chunk.lora:
                add_lora_gradient(part, dlogits_CV, chunk.hidden_CH, chunk.h_CR, gradient_CH)
        return values_TM, gradient_TH

    def logits(self, hidden_TH: Tensor, lora: Sequence[BoundLora] = ()) -> Iterator[tuple[slice, Tensor]]:
        """Yield all logits chunk by chunk: the rows of the chunk, and their logits (C, V) fp32."""
        for rows in self._chunks(len(hidden_TH)):
            hidden_CH = hidden_TH[rows]
            logits_CV = self._base_logits(hidden_CH)
            clipped = [part for each in lora if (part := clip_lora(each, rows.start, rows.stop)) is not None]
            yield rows, self._finished(logits_CV, _lora_logits(clipped, hidden_CH, logits_CV.shape)[1])

    def few_logits(
        self, hidden_CH: Tensor, add_lora: Callable[[Tensor, Tensor], None] | None, out: Tensor | None = None
    ) -> Tensor:
        """Return the logits of at most ``chunk_rows`` rows, (C, V) fp32; if ``out`` is given, they are written there.

        ``add_lora(hidden, logits)`` adds in place.
        """
        logits_CV = self._base_logits(hidden_CH, out)
        if add_lora is not None:
            add_lora(hidden_CH, logits_CV)
        return self._finished(logits_CV, None)

    def _chunks(self, rows: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_rows, rows)) for start in range(0, rows, self.chunk_rows)]

    def _chunk(
        self, hidden_TH: Tensor, targets_TK: Tensor, lora: Sequence[BoundLora], query: HeadQuery, rows: slice
    ) -> "_Chunk":
        hidden_CH = hidden_TH[rows]
        logits_CV = self._base_logits(hidden_CH)
        clipped = [part for each in lora if (part := clip_lora(each, rows.start, rows.stop)) is not None]
        h_CR, lora_CV = _lora_logits(clipped, hidden_CH, logits_CV.shape)
        softmax = self._softmax(logits_CV, lora_CV, targets_TK[rows], query.for_rows(rows))
        return _Chunk(hidden_CH, softmax, clipped, h_CR)

    def _softmax(self, logits_CV: Tensor, lora_CV: Tensor | None, targets_CK: Tensor, query: HeadQuery) -> "Softmax":
        if query.empty and self._use_kernels(logits_CV):
            return KernelSoftmax(logits_CV, lora_CV, targets_CK)
        return PlainSoftmax(self._finished(logits_CV, lora_CV), self.spec, targets_CK, query)

    def _use_kernels(self, logits_CV: Tensor) -> bool:
        return logits_CV.is_cuda and self.spec.scale == 1.0 and self.spec.softcap is None

    def _base_logits(self, hidden_CH: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits without LoRA, (C, V) fp32.

        On CUDA they are the product's fp32 accumulator; elsewhere the product is rounded to the compute dtype first.
        """
        spec = self.spec
        if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
            if out is None:
                logits = torch.mm(hidden_CH, spec.weight_VH.t(), out_dtype=torch.float32)
            else:
                logits = torch.ops.aten.mm.dtype_out(hidden_CH, spec.weight_VH.t(), torch.float32, out=out)
            return logits if spec.bias_V is None else logits.add_(spec.bias_V)
        logits = linear(hidden_CH, spec.weight_VH, spec.bias_V).float()
        return logits if out is None else out.copy_(logits)

    def _finished(self, logits_CV: Tensor, lora_CV: Tensor | None) -> Tensor:
        """Apply LoRA, scale and soft cap to the logits in place, and return them."""
        if lora_CV is not None:
            logits_CV += lora_CV
        if self.spec.scale != 1.0:
            logits_CV *= self.spec.scale
        if self.spec.softcap is not None:
            logits_CV.div_(self.spec.softcap).tanh_().mul_(self.spec.softcap)
        return logits_CV


class Softmax(Protocol):
    """The logits of a chunk. ``values_CM`` is there from the start; :meth:`gradient` may be called once after that."""

    values_CM: Tensor

    def gradient(self, coefficients_CM: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradient with respect to h W.T, (C, V). May overwrite the logits.

        It is Σ_k c_k (onehot(target_k) − p), plus that of the entropy, times the slopes of temperature, cap and scale.
        """


class PlainSoftmax:
    """The softmax in torch operations, in place where possible: a chunk of logits is the largest tensor of a pass."""

    def __init__(self, logits_CV: Tensor, spec: HeadSpec, targets_CK: Tensor, query: HeadQuery) -> None:
        self._spec = spec
        self._targets_CK = targets_CK
        self._query = query
        self._slope_CV = None if spec.softcap is None else 1 - (logits_CV / spec.softcap) ** 2
        if query.sharpness_T1 is not None:
            logits_CV.mul_(query.sharpness_T1)
        kept_CV = logits_CV.clone() if query.logits else None
        picked_CK = logits_CV.gather(1, targets_CK)
        highest_C1 = logits_CV.amax(1, keepdim=True)
        likeliest_C1 = logits_CV.argmax(1, keepdim=True) if query.statistics else None
        self._exp_CV = logits_CV.sub_(highest_C1).exp_()
        self._total_C1 = self._exp_CV.sum(1, keepdim=True)
        self.values_CM = picked_CK - highest_C1 - self._total_C1.log()
        if likeliest_C1 is not None:
            self.values_CM = torch.cat([self.values_CM, self._entropy(), likeliest_C1.float()], 1)
        if kept_CV is not None:
            self.values_CM = torch.cat([self.values_CM, kept_CV], 1)

    def gradient(self, coefficients_CM: Tensor, dtype: torch.dtype) -> Tensor:
        width = self._targets_CK.shape[1]
        coefficients_CK = coefficients_CM[:, :width]
        entropy_CV = self._entropy_gradient(coefficients_CM[:, width : width + 1]) if self._query.statistics else None
        dlogits_CV = self._exp_CV.mul_(-coefficients_CK.sum(1, keepdim=True) / self._total_C1)
        self._add_to_targets(dlogits_CV, coefficients_CK)
        if entropy_CV is not None:
            dlogits_CV += entropy_CV
        if self._query.logits:
            self._add_to_logits(dlogits_CV, coefficients_CM)
        if self._query.sharpness_T1 is not None:
            dlogits_CV *= self._query.sharpness_T1
        if self._slope_CV is not None:
            dlogits_CV *= self._slope_CV
        if self._spec.scale != 1.0:
            dlogits_CV *= self._spec.scale
        return dlogits_CV.to(dtype)

    def _add_to_targets(self, dlogits_CV: Tensor, coefficients_CK: Tensor) -> None:
        dlogits_CV.scatter_add_(1, self._targets_CK, coefficients_CK)  # the same target may occur twice

    def _add_to_logits(self, dlogits_CV: Tensor, coefficients_CM: Tensor) -> None:
        dlogits_CV += coefficients_CM[:, -dlogits_CV.shape[1] :]

    def _entropy(self) -> Tensor:
        """Return H = −Σ p log p, (C, 1)."""
        p_CV = self._exp_CV / self._total_C1
        return -torch.xlogy(p_CV, p_CV).sum(1, keepdim=True)

    def _entropy_gradient(self, coefficients_C1: Tensor) -> Tensor | None:
        """Return c · dH/dlogits = −c · p · (log p + H); None if no loss depends on entropies (all c are 0)."""
        if not coefficients_C1.any():
            return None
        p_CV = self._exp_CV / self._total_C1
        entropy_C1 = self.values_CM[:, self._targets_CK.shape[1], None]
        return torch.xlogy(p_CV, p_CV).addcmul_(p_CV, entropy_C1).mul_(-coefficients_C1)


class KernelSoftmax:
    """The softmax in two Triton kernels. CUDA builds of torch come with Triton."""

    def __init__(self, logits_CV: Tensor, lora_CV: Tensor | None, targets_CK: Tensor) -> None:
        from twinkle.model.decoder.head_kernels import log_normalizer

        self._logits_CV, self._lora_CV, self._targets_CK = logits_CV, lora_CV, targets_CK
        self._norm_C1 = log_normalizer(logits_CV, lora_CV)
        picked_CK = logits_CV.gather(1, targets_CK)
        if lora_CV is not None:
            picked_CK = picked_CK + lora_CV.gather(1, targets_CK)
        self.values_CM = picked_CK - self._norm_C1

    def gradient(self, coefficients_CM: Tensor, dtype: torch.dtype) -> Tensor:
        from twinkle.model.decoder.head_kernels import logits_gradient

        return logits_gradient(self._logits_CV, self._lora_CV, self._norm_C1, self._targets_CK, coefficients_CM, dtype)


@dataclass(frozen=True)
class _Chunk:
    hidden_CH: Tensor
    softmax: Softmax
    lora: list[BoundLora]  # clipped to the chunk
    h_CR: Tensor  # hidden A.T


def _lora_logits(lora: Sequence[BoundLora], hidden_CH: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
    """Return hidden A.T, and LoRA's part of the logits (C, V), zero in rows without LoRA; None if ``lora`` is empty."""
    h_CR = hidden_CH.new_empty(len(hidden_CH), max((part.a_GRI.shape[1] for part in lora), default=0))
    if not lora:
        return h_CR, None
    everywhere = sum(part.segment.stop - part.segment.start for part in lora) == shape[0]
    lora_CV = hidden_CH.new_empty(shape) if everywhere else hidden_CH.new_zeros(shape)
    for part in lora:
        add_lora(part, hidden_CH, h_CR, lora_CV, beta=0)
    return h_CR, lora_CV


def clip_lora(lora: BoundLora, start: int, stop: int) -> BoundLora | None:
    """Return the part of a segment within rows ``start``…``stop``, with rows counted from ``start``; None if empty."""
    segment = lora.segment
    low, high = max(segment.start, start), min(segment.stop, stop)
    if low >= high:
        return None
    ends = list(accumulate(segment.groups.sizes, initial=segment.start))
    overlaps = [min(after, high) - max(before, low) for before, after in pairwise(ends)]
    inside = [index for index, rows in enumerate(overlaps) if rows > 0]
    picked = slice(inside[0], inside[-1] + 1)
    groups = Groups(tuple(overlaps[picked]))
    clipped = replace(
        lora,
        segment=Segment(low - start, high - start, groups),
        a_GRI=lora.a_GRI[picked],
        b_GOR=lora.b_GOR[picked],
        dropout=None if lora.dropout is None else lora.dropout.rows(low - segment.start, high - segment.start),
    )
    if lora.da_GRI is None or lora.db_GOR is None:
        return clipped
    return replace(clipped, da_GRI=lora.da_GRI[picked], db_GOR=lora.db_GOR[picked])
