"""The head's two passes over its logits as one CUDA kernel each (Triton).

In plain torch operations a chunk of logits would be read and written a dozen times; with a vocabulary of 128k that is a
tenth of a training step. Logits are fp32; if the head has LoRA, its part is a separate tensor in the compute dtype.

Shapes: C rows of a chunk, V vocabulary, K targets per row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def log_normalizer(logits_CV: Tensor, lora_CV: Tensor | None) -> Tensor:
    """Return log Σ exp(logits + lora), (C, 1) fp32."""
    rows, vocab = logits_CV.shape
    out_C = torch.empty(rows, device=logits_CV.device, dtype=torch.float32)
    second = logits_CV if lora_CV is None else lora_CV
    _log_normalizer[(rows,)](
        logits_CV, second, out_C, vocab, HAS_LORA=lora_CV is not None, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return out_C.unsqueeze(1)


def logits_gradient(
    logits_CV: Tensor,
    lora_CV: Tensor | None,
    norm_C1: Tensor,
    targets_CK: Tensor,
    coefficients_CK: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return Σ_k c_k (onehot(target_k) − softmax(logits)), (C, V), computed in fp32 and rounded once."""
    rows, vocab = logits_CV.shape
    out_CV = torch.empty(rows, vocab, device=logits_CV.device, dtype=dtype)
    second = logits_CV if lora_CV is None else lora_CV
    _logits_gradient[(rows, triton.cdiv(vocab, _BLOCK))](
        logits_CV,
        second,
        norm_C1,
        targets_CK.contiguous(),
        coefficients_CK.contiguous(),
        out_CV,
        vocab,
        targets_CK.shape[1],
        HAS_LORA=lora_CV is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out_CV


@triton.jit
def _log_normalizer(logits, lora, out, vocab, HAS_LORA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest = float("-inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab
        x = tl.load(logits + row * vocab + columns, mask=inside, other=float("-inf"))
        if HAS_LORA:
            x += tl.load(lora + row * vocab + columns, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    tl.store(out + row, highest + tl.log(total))


@triton.jit(do_not_specialize=["targets_per_row"])
def _logits_gradient(
    logits,
    lora,
    norm,
    targets,
    coefficients,
    out,
    vocab,
    targets_per_row,
    HAS_LORA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    x = tl.load(logits + row * vocab + columns, mask=inside, other=float("-inf"))
    if HAS_LORA:
        x += tl.load(lora + row * vocab + columns, mask=inside, other=0.0).to(tl.float32)
    probability = tl.exp(x - tl.load(norm + row))
    gradient = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(targets_per_row):
        target = tl.load(targets + row * targets_per_row + k)
        coefficient = tl.load(coefficients + row * targets_per_row + k)
        # c·(1 − p) in one step: with p close to 1, c − c·p would lose its digits to the rounding of c·p
        gradient += coefficient * (tl.where(columns == target, 1.0, 0.0) - probability)
    tl.store(out + row * vocab + columns, gradient.to(out.dtype.element_ty), mask=inside)
