"""The Triton kernels of ``fla-core`` for the gated delta rule, on CUDA, where that package is installed.

Shapes: T rows, K key heads of width D, V value heads of width E.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twinkle.model.decoder.linear_attention.bounds import Bounds

_WIDEST_HEAD = 256

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Bounds], Tensor]


def delta_rule_kernel(v_TVE: Tensor) -> DeltaRule | None:
    """Return the kernels' delta rule, with the arguments of the plain one; None where they are not for these rows.

    They are for 16-bit numbers on CUDA: products of fp32 numbers would be rounded to TF32.
    """
    half = v_TVE.dtype in (torch.bfloat16, torch.float16)
    return _fla_delta_rule if v_TVE.is_cuda and half and v_TVE.shape[2] <= _WIDEST_HEAD and _chunked() else None


@functools.cache
def _chunked() -> Any:
    """Return the function of fla-core; None if the package is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
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
