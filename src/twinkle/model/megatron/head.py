"""The output head under tensor parallelism: each process computes the logits of its own part of the vocabulary.

The processes of a tensor parallel group have the same hidden states, and each holds ⌈V / n⌉ rows of the head's weights,
in order; where n does not divide V, the last rows of all are padding, whose logits are −∞. Per chunk of rows the
processes exchange a few numbers per row: the largest logit, the sum of exponentials, the logits of targets. The values
that come out, and the losses that are computed from them, are the same in all of them. dL/dhidden is added up once.

Shapes: as in :mod:`twinkle.model.decoder.head`, with v the process's own part of the vocabulary V, with padding. In the
classes of softmax, which share formulas with those of one process, V is that part.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.decoder.head import (
    NOTHING_MORE,
    ChunkedHead,
    Coefficients,
    HeadGradient,
    HeadQuery,
    HeadSpec,
    KernelSoftmax,
    PlainSoftmax,
    Softmax,
)
from twinkle.model.decoder.lora.segments import BoundLora
from twinkle.model.parallel import Ranks


@dataclass(frozen=True)
class _Slice:
    """The part of the vocabulary that this process has: ``real`` tokens from ``start`` on, then padding."""

    ranks: Ranks
    vocabulary: int
    start: int
    real: int

    def reduce(self, tensor: Tensor, how: Any) -> Tensor:
        """Reduce a tensor over all processes, in place, and return it."""
        if self.ranks.size > 1:
            dist.all_reduce(tensor, how, group=self.ranks.group)
        return tensor

    def gather(self, local_Cv: Tensor) -> Tensor:
        """Return a copy with the numbers of the whole vocabulary, (C, V)."""
        if self.ranks.size == 1:
            return local_Cv.clone()
        parts = [torch.empty_like(local_Cv) for _ in range(self.ranks.size)]
        dist.all_gather(parts, local_Cv, group=self.ranks.group)
        return torch.cat(parts, 1)[:, : self.vocabulary]

    def own_columns(self, whole_CV: Tensor) -> Tensor:
        return whole_CV[:, self.start : self.start + self.real]

    def own_targets(self, targets_CK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets counted from this process's first token, and whether each of them is one of its tokens."""
        local_CK = targets_CK - self.start
        return local_CK, (local_CK >= 0) & (local_CK < self.real)


class VocabParallelHead(ChunkedHead):
    """A :class:`ChunkedHead` whose vocabulary is divided. All processes of ``ranks`` call its methods together.

    ``spec`` has this process's rows of the weights and of the bias, with padding. The gradient of head LoRA is added to
    its own rows of B, and to the whole A as far as it comes from them: a sum over processes is whole.
    """

    def __init__(
        self, spec: HeadSpec, chunk_rows: int, ranks: Ranks, vocabulary: int, gradient: HeadGradient | None = None
    ) -> None:
        super().__init__(spec, chunk_rows, gradient)
        rows = len(spec.weight_VH)
        assert rows == -(-vocabulary // ranks.size), "a process has another part of the vocabulary"
        start = min(ranks.number * rows, vocabulary)
        self._slice = _Slice(ranks, vocabulary, start, min(rows, vocabulary - start))

    @property
    def vocabulary(self) -> int:
        return self._slice.vocabulary

    def logprobs_and_gradient(
        self,
        hidden_TH: Tensor,
        targets_TK: Tensor,
        coefficients: Coefficients,
        lora: Sequence[BoundLora] = (),
        query: HeadQuery = NOTHING_MORE,
        between: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        values_TM, gradient_TH = super().logprobs_and_gradient(
            hidden_TH, targets_TK, coefficients, lora, query, between
        )
        self._slice.ranks.add_up(gradient_TH)  # each process has the part of its own logits
        return values_TM, gradient_TH

    def logits(self, hidden_TH: Tensor, lora: Sequence[BoundLora] = ()) -> Iterator[tuple[slice, Tensor]]:
        for rows, logits_Cv in super().logits(hidden_TH, lora):
            yield rows, self._slice.gather(logits_Cv)

    def few_logits(
        self, hidden_CH: Tensor, add_lora: Callable[[Tensor, Tensor], None] | None, out: Tensor | None = None
    ) -> Tensor:
        raise UnsupportedError("a sampler cannot run on a part of the vocabulary; allowed: a model that is not cut")

    def _softmax(self, logits_CV: Tensor, lora_CV: Tensor | None, targets_CK: Tensor, query: HeadQuery) -> Softmax:
        own = self._slice
        if query.empty and own.real > 0 and self._use_kernels(logits_CV):
            return _CutKernelSoftmax(own, logits_CV, lora_CV, targets_CK)
        return _CutSoftmax(own, self._finished(logits_CV, lora_CV), self.spec, targets_CK, query)


class _CutSoftmax(PlainSoftmax):
    """The softmax in torch operations. Its formulas are those of one process, with sums over all processes."""

    def __init__(self, own: _Slice, logits_CV: Tensor, spec: HeadSpec, targets_CK: Tensor, query: HeadQuery) -> None:
        self._own = own
        self._spec = spec
        self._query = query
        self._targets_CK, self._is_own_CK = own.own_targets(targets_CK)
        self._slope_CV = None if spec.softcap is None else 1 - (logits_CV / spec.softcap) ** 2
        if query.sharpness_T1 is not None:
            logits_CV.mul_(query.sharpness_T1)
        kept_CV = own.gather(logits_CV) if query.logits else None
        logits_CV[:, own.real :] = float("-inf")
        own_highest_C1 = logits_CV.amax(1, keepdim=True)
        highest_C1 = own.reduce(own_highest_C1.clone(), dist.ReduceOp.MAX)
        likeliest_C1 = self._likeliest(logits_CV, own_highest_C1, highest_C1) if query.statistics else None
        picked_CK = logits_CV.gather(1, self._safe_targets).where(self._is_own_CK, 0)
        self._exp_CV = logits_CV.sub_(highest_C1).exp_()
        sums_CN = torch.cat([self._exp_CV.sum(1, keepdim=True), picked_CK], 1)
        own.reduce(sums_CN, dist.ReduceOp.SUM)
        self._total_C1 = sums_CN[:, :1]
        self.values_CM = sums_CN[:, 1:] - highest_C1 - self._total_C1.log()
        if likeliest_C1 is not None:
            self.values_CM = torch.cat([self.values_CM, self._entropy(), likeliest_C1.float()], 1)
        if kept_CV is not None:
            self.values_CM = torch.cat([self.values_CM, kept_CV], 1)

    def _add_to_targets(self, dlogits_CV: Tensor, coefficients_CK: Tensor) -> None:
        dlogits_CV.scatter_add_(1, self._safe_targets, coefficients_CK.where(self._is_own_CK, 0))

    def _add_to_logits(self, dlogits_CV: Tensor, coefficients_CM: Tensor) -> None:
        own = self._own
        dlogits_CV[:, : own.real] += own.own_columns(coefficients_CM[:, -own.vocabulary :])

    @property
    def _safe_targets(self) -> Tensor:
        """Return the targets, with those of other processes replaced by token 0."""
        return self._targets_CK.where(self._is_own_CK, 0)

    def _likeliest(self, logits_CV: Tensor, own_highest_C1: Tensor, highest_C1: Tensor) -> Tensor:
        """Return the most likely token of each row; of several, the first."""
        token_C1 = logits_CV.argmax(1, keepdim=True) + self._own.start
        token_C1 = token_C1.where(own_highest_C1 == highest_C1, self._own.vocabulary)
        # If a row holds NaN, no process may have found the highest: the row's log-probabilities are NaN then.
        return self._own.reduce(token_C1, dist.ReduceOp.MIN).clamp_(max=self._own.vocabulary - 1)

    def _entropy(self) -> Tensor:
        return self._own.reduce(super()._entropy(), dist.ReduceOp.SUM)


class _CutKernelSoftmax(KernelSoftmax):
    """The softmax in two Triton kernels."""

    def __init__(self, own: _Slice, logits_CV: Tensor, lora_CV: Tensor | None, targets_CK: Tensor) -> None:
        from twinkle.model.decoder.head_kernels import log_normalizer

        self._logits_CV, self._lora_CV = logits_CV, lora_CV
        self._targets_CK, is_own_CK = own.own_targets(targets_CK)  # the kernel finds no column for those of others
        self._targets_CK = self._targets_CK.where(is_own_CK, -1)
        logits_CV[:, own.real :] = float("-inf")
        own_norm_C1 = log_normalizer(logits_CV, lora_CV)
        highest_C1 = own.reduce(own_norm_C1.clone(), dist.ReduceOp.MAX)
        safe_CK = self._targets_CK.clamp(min=0)
        picked_CK = logits_CV.gather(1, safe_CK)
        if lora_CV is not None:
            picked_CK = picked_CK + lora_CV.gather(1, safe_CK)
        sums_CN = torch.cat([(own_norm_C1 - highest_C1).exp(), picked_CK.where(is_own_CK, 0)], 1)
        own.reduce(sums_CN, dist.ReduceOp.SUM)
        self._norm_C1 = highest_C1 + sums_CN[:, :1].log()
        self.values_CM = sums_CN[:, 1:] - self._norm_C1
