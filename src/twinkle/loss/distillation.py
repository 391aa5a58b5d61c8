"""Generalised knowledge distillation: compares the student's distribution of each token with the teacher's.

Shapes: B sequences, T positions, N valid tokens, C of them in one chunk, V vocabulary entries, K of them in a top-k.

    S, T = softmax(logits / temperature) of student and teacher; M = β·T + (1 − β)·S
    β = 0: KL(T‖S);  β = 1: KL(S‖T);  else: β·KL(T‖M) + (1 − β)·KL(S‖M)

With a top-k of the teacher, S and T are distributions over those K entries only. The loss is a mean over valid tokens.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from twinkle.errors import InvalidInputError
from twinkle.loss.alignment import compute_dtype
from twinkle.loss.interface import IGNORE_INDEX, Inputs, Loss, LossOutput, Outputs
from twinkle.loss.token_logps import label_mask, required, zero_of

__all__ = ["GKDLoss"]

# A log-probability for "never": e^−10⁴ is 0 in float32, while 0 · −10⁴ is still 0 where 0 · −∞ is NaN.
NEVER = -1e4


class GKDLoss(Loss):
    """The distillation loss; see the module for the formula.

    The teacher is given as ``teacher_logits`` (B, T, V), of which only the ``topk`` largest are used if ``topk`` is
    set, or as ``teacher_topk_logprobs`` and ``teacher_topk_indices`` (B, T, K). ``topk`` of a call overrides that of
    the constructor. ``teacher_mode`` is accepted for older scripts: what a call gives decides.

    Positions of the teacher beyond those of the batch are ignored. If the vocabularies differ in size, the smaller one
    gives probability 0 to the entries that it lacks. Tokens are computed in chunks of ``chunk_size``, and once more in
    the backward pass, so that only the logits themselves are in memory for all tokens.
    """

    require_logits = True
    require_logps = False
    call_arguments: ClassVar[tuple[str, ...]] = (
        "teacher_logits",
        "teacher_topk_indices",
        "teacher_topk_logprobs",
        "topk",
    )

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        ignore_index: int = IGNORE_INDEX,
        chunk_size: int = 512,
        *,
        teacher_mode: str = "full",
        topk: int | None = None,
    ) -> None:
        if teacher_mode != "full":
            raise InvalidInputError("teacher_mode", teacher_mode, "'full'; a call with a top-k of the teacher uses it")
        if topk is not None and topk < 1:
            raise InvalidInputError("topk", topk, "1 or more, or None for the whole vocabulary")
        if not 0 <= beta <= 1:
            raise InvalidInputError("beta", beta, "from 0 to 1")
        if not (math.isfinite(temperature) and temperature > 0):
            raise InvalidInputError("temperature", temperature, "a finite number above 0")
        if chunk_size < 1:
            raise InvalidInputError("chunk_size", chunk_size, "1 or more")
        self.beta = beta
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.chunk_size = chunk_size
        self.topk = topk

    def __call__(
        self,
        inputs: Inputs,
        outputs: Outputs,
        *,
        teacher_logits: Any = None,
        topk: int | None = None,
        teacher_topk_logprobs: Any = None,
        teacher_topk_indices: Any = None,
        **_: Any,
    ) -> LossOutput:
        logits_BTV = required(outputs, "logits")
        mask_BT = label_mask(inputs, self.ignore_index)
        topk = self.topk if topk is None else topk
        teacher, indices = read_teacher(teacher_logits, topk, teacher_topk_logprobs, teacher_topk_indices).for_batch(
            *mask_BT.shape
        )
        teacher_NV = teacher.to(logits_BTV.device)[mask_BT]
        indices_NK = None if indices is None else indices.to(logits_BTV.device)[mask_BT]
        student_NV = logits_BTV[mask_BT]
        total = zero_of(logits_BTV)
        for start in range(0, len(student_NV), self.chunk_size):
            part = slice(start, start + self.chunk_size)
            chunk = (student_NV[part], teacher_NV[part], None if indices_NK is None else indices_NK[part])
            if logits_BTV.requires_grad and torch.is_grad_enabled():
                total = total + checkpoint(self._chunk_loss, *chunk, use_reentrant=False)
            else:
                total = total + self._chunk_loss(*chunk)
        return {"loss": total / max(len(student_NV), 1), "num_tokens": 0}

    def _chunk_loss(self, student_CV: Tensor, teacher_CV: Tensor, indices_CK: Tensor | None) -> Tensor:
        """Return the sum of the tokens' divergences. With indices, ``teacher_CV`` is (C, K): the teacher's top-k."""
        dtype = compute_dtype(student_CV)
        student_CV, teacher_CV = student_CV.to(dtype), teacher_CV.to(dtype)
        if indices_CK is not None:
            known_CK = indices_CK < student_CV.shape[-1]
            student_CV = student_CV.gather(-1, torch.where(known_CK, indices_CK, 0)).where(known_CK, NEVER)
        else:
            width = max(student_CV.shape[-1], teacher_CV.shape[-1])
            student_CV, teacher_CV = _never_padded(student_CV, width), _never_padded(teacher_CV, width)
        student_CV = F.log_softmax(student_CV / self.temperature, dim=-1)
        teacher_CV = F.log_softmax(teacher_CV / self.temperature, dim=-1).clamp(min=NEVER)
        return _divergence(teacher_CV, student_CV, self.beta).sum()


def _divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Return the divergence (see the module) of each row; both arguments are log-probabilities."""
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (torch.exp(log_p) * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class Teacher:
    """The teacher's logits (B, T, V), or K logits or log-probabilities of each position with the tokens they are of."""

    values: Tensor
    indices: Tensor | None
    field: str  # the argument that ``values`` come from

    def for_batch(self, batch: int, length: int) -> tuple[Tensor, Tensor | None]:
        """Return values and indices of a batch's positions, without those that the batch does not have."""
        shape = self.values.shape
        if len(shape) != 3 or shape[0] != batch or shape[1] < length:
            allowed = f"({batch}, {length} or more, entries), or {batch} rows of at least the sequences' lengths"
            raise InvalidInputError(self.field, f"shape {tuple(shape)}", allowed)
        return self.values[:, :length], None if self.indices is None else self.indices[:, :length]


def read_teacher(
    teacher_logits: Any, topk: int | None, teacher_topk_logprobs: Any, teacher_topk_indices: Any
) -> Teacher:
    """Read the arguments of a distillation loss: tensors, or nested lists as a client sends them."""
    logits = _tensor("teacher_logits", teacher_logits)
    topk_logprobs = _tensor("teacher_topk_logprobs", teacher_topk_logprobs)
    topk_indices = _tensor("teacher_topk_indices", teacher_topk_indices)
    if topk_logprobs is not None or topk_indices is not None:
        if topk_logprobs is None or topk_indices is None or topk_logprobs.shape != topk_indices.shape:
            shown, allowed = _shape(topk_indices), f"that of teacher_topk_logprobs, {_shape(topk_logprobs)}"
            raise InvalidInputError("teacher_topk_indices", shown, allowed)
        if topk_indices.is_floating_point() or topk_indices.dtype == torch.bool:
            raise InvalidInputError("teacher_topk_indices", str(topk_indices.dtype), "token ids, integers")
        if topk_indices.numel() and int(topk_indices.min()) < 0:
            raise InvalidInputError("teacher_topk_indices", int(topk_indices.min()), "token ids ≥ 0")
        return Teacher(topk_logprobs.detach(), topk_indices, "teacher_topk_logprobs")
    if logits is None:
        allowed = "a tensor, unless teacher_topk_logprobs and teacher_topk_indices are given"
        raise InvalidInputError("teacher_logits", None, allowed)
    if topk is None:
        return Teacher(logits.detach(), None, "teacher_logits")
    if not isinstance(topk, int) or not 1 <= topk <= logits.shape[-1]:
        raise InvalidInputError("topk", topk, f"from 1 to the teacher's vocabulary, {logits.shape[-1]}")
    best = logits.detach().topk(topk, dim=-1)
    return Teacher(best.values, best.indices, "teacher_logits")


def _never_padded(logits: Tensor, width: int) -> Tensor:
    return F.pad(logits, (0, max(width - logits.shape[-1], 0)), value=NEVER)


def _tensor(field: str, values: Any) -> Tensor | None:
    """Convert to a tensor; None stays None. A teacher behind a service sends nested lists.

    Rows of different lengths, one for each sequence, are padded with 0, which no valid position reads.
    """
    if values is None or isinstance(values, Tensor):
        return values
    allowed = "a tensor, or for each sequence a list of rows of numbers, all of one width"
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        pass  # not a rectangle
    try:
        rows = [torch.as_tensor(row) for row in values]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(field, f"{type(values).__name__} of {_sizes(values)}", allowed) from error


def _sizes(values: Any) -> str:
    """Describe the lengths in nested lists, for an error."""
    if not isinstance(values, list | tuple):
        return "?"
    lengths = sorted({len(row) for row in values if isinstance(row, list | tuple)})
    return f"{len(values)} rows of {lengths[:4] or 'numbers'} entries"


def _shape(values: Tensor | None) -> str:
    return "nothing" if values is None else f"shape {tuple(values.shape)}"
