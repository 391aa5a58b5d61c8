"""Our own attention kernels as differentiable functions, for eager and for compiled code.

Shapes: T tokens, N sequences, n tiles, H query heads, J key/value heads, D head dimension.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle.model.decoder.tiles import TILE_ROWS

HEAD_SIZES = (64, 128)  # the sizes for which the kernels were measured


def tile_table(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return the tiles of packed sequences, (n, 3): the sequence's first row, its length, and the tile's start in it.

    The tiles furthest from the start of their sequence come first: they see the most keys, and take longest.
    """
    lengths_N = np.asarray(lengths, np.int64)
    counts_N = -(-lengths_N // TILE_ROWS)
    sequence_n = np.repeat(np.arange(len(lengths_N)), counts_N)
    start_n = (np.arange(counts_N.sum()) - (counts_N.cumsum() - counts_N)[sequence_n]) * TILE_ROWS
    first_N = lengths_N.cumsum() - lengths_N
    tiles_n3 = np.stack([first_N[sequence_n], lengths_N[sequence_n], start_n], 1)
    return tiles_n3[np.argsort(-start_n, kind="stable")].astype(np.int32)


def attend(q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, tiles_n3: Tensor, scale: float) -> Tensor:
    """Compute causal attention within each sequence: a token sees itself and the tokens before it.

    All tensors must be contiguous. ``tiles_n3``: a :func:`tile_table` on the device. Rows outside all tiles are not
    written.
    """
    inputs = q_THD, k_TJD, v_TJD, tiles_n3, scale
    if torch.compiler.is_compiling():
        out_THD, _ = _compiled_forward(*inputs)
    elif torch.is_grad_enabled():
        out_THD = _Attention.apply(*inputs)
    else:
        out_THD, _ = _forward(*inputs)
    return out_THD


def _forward(q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, tiles_n3: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from twinkle.model.decoder.packed_attention_kernels import attend  # needs Triton, which CUDA builds of torch have

    return attend(q_THD, k_TJD, v_TJD, tiles_n3, scale)


def _backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    out_THD: Tensor,
    norm_HT: Tensor,
    tiles_n3: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from twinkle.model.decoder.packed_attention_kernels import attend_backward

    return attend_backward(dout_THD.contiguous(), q_THD, k_TJD, v_TJD, out_THD, norm_HT, tiles_n3, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q_THD, k_TJD, v_TJD, tiles_n3, ctx.scale = inputs
        out_THD, norm_HT = _forward(*inputs)
        ctx.save_for_backward(q_THD, k_TJD, v_TJD, out_THD, norm_HT, tiles_n3)
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TJD, v_TJD, out_THD, norm_HT, tiles_n3 = ctx.saved_tensors
        return *_backward(dout_THD, q_THD, k_TJD, v_TJD, out_THD, norm_HT, tiles_n3, ctx.scale), None, None


# The same functions for compiled code. The compiler treats each as one opaque operation.

_compiled_forward = torch.library.custom_op("twinkle::packed_attention", _forward, mutates_args=())
_compiled_backward = torch.library.custom_op("twinkle::packed_attention_backward", _backward, mutates_args=())


@_compiled_forward.register_fake
def _(q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, tiles_n3: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q_THD.shape
    return torch.empty_like(q_THD), q_THD.new_empty(heads, rows, dtype=torch.float32)


@_compiled_backward.register_fake
def _(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    out_THD: Tensor,
    norm_HT: Tensor,
    tiles_n3: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_THD), torch.empty_like(k_TJD), torch.empty_like(v_TJD)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_TJD, v_TJD, tiles_n3, ctx.scale = inputs
    ctx.save_for_backward(q_THD, k_TJD, v_TJD, *output, tiles_n3)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout_THD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_compiled_backward(dout_THD, *ctx.saved_tensors, ctx.scale), None, None


_compiled_forward.register_autograd(_differentiate, setup_context=_save)
