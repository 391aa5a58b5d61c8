"""The kernels of ``fla-core`` for the gated delta rule, on CUDA, where that package is installed and gives our numbers.

Whether it does depends on the versions of Triton and of other packages: with Triton 3.4 to 3.7.0 on Hopper GPUs it
refuses to compute gradients, unless ``tilelang`` is installed too. So the kernels are compared with the plain rule
before they are used.

Shapes: T rows, K key heads of width D, V value heads of width E.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twinkle.model.decoder.fused.kernel_check import kernels_agree
from twinkle.model.decoder.linear_attention.bounds import Bounds
from twinkle.model.decoder.linear_attention.delta_rule import gated_delta_rule

_WIDEST_HEAD = 256
# Sequences on which kernels are compared with the plain rule: shorter and longer than a chunk of 64 rows.
_COMPARED = (70, 1, 130)
# Of an output and of gradients. The kernels round the numbers between two products to 16 bits.
_CLOSE = 0.06

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Bounds], Tensor]


def delta_rule_kernel(q_TKD: Tensor, v_TVE: Tensor) -> DeltaRule | None:
    """Return the kernels' delta rule, with the arguments of the plain one; None where they are not for these rows.

    They are for 16-bit numbers on CUDA: products of fp32 numbers would be rounded to TF32.
    """
    half = v_TVE.dtype in (torch.bfloat16, torch.float16)
    if not v_TVE.is_cuda or not half or v_TVE.shape[2] > _WIDEST_HEAD:
        return None
    return _fla_delta_rule if _works(v_TVE.device, v_TVE.dtype, q_TKD.shape[1:], v_TVE.shape[1:]) else None


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, keys_KD: Sequence[int], values_VE: Sequence[int]) -> bool:
    """Return whether the kernels give, for heads of these sizes, what the plain rule gives."""
    return kernels_agree(
        "the delta rule is computed without fla-core", lambda: _both(device, dtype, keys_KD, values_VE), _CLOSE
    )


def _both(
    device: torch.device, dtype: torch.dtype, keys_KD: Sequence[int], values_VE: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return outputs and gradients of the kernels, each with that of the plain rule."""
    generator, rows = torch.Generator().manual_seed(0), sum(_COMPARED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    heads = values_VE[0]
    drawn = (normal(*keys_KD), normal(*keys_KD), normal(*values_VE), -normal(heads).abs(), normal(heads).sigmoid())
    q, k, v, g, beta = (each.to(device, dtype).requires_grad_() for each in drawn)
    bounds = Bounds.from_lengths(_COMPARED, device)
    slopes = normal(*values_VE).to(device, dtype)
    given = (q, k, v, g.float(), beta)
    ours, theirs = gated_delta_rule(*given, bounds)[0], _fla_delta_rule(*given, bounds)
    expected, found = ([each, *torch.autograd.grad(each, (q, k, v, g, beta), slopes)] for each in (ours, theirs))
    return list(zip(found, expected, strict=True))


@functools.cache
def _chunked() -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def _fla_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_TVE: Tensor, g_TV: Tensor, beta_TV: Tensor, bounds: Bounds
) -> Tensor:
    repeats = v_TVE.shape[1] // q_TKD.shape[1]
    if repeats > 1:  # older versions want as many key heads as value heads
        q_TKD, k_TKD = (each.repeat_interleave(repeats, 1) for each in (q_TKD, k_TKD))
    given = (each.unsqueeze(0).contiguous() for each in (q_TKD, k_TKD, v_TVE, g_TV, beta_TV))
    out, _ = _chunked()(*given, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds.ends_N1)
    out_TVE: Tensor = out[0]
    return out_TVE
