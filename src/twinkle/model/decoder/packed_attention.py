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


def attend(
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    tiles_n3: Tensor,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within each sequence: a token sees itself and the tokens before it.

    All tensors must be contiguous. ``tiles_n3``: a :func:`tile_table` on the device. Rows outside all tiles are not
    written. ``window``: a token sees so many tokens at most, itself included. ``sinks_H``: one more score of each head
    in the softmax, whose weight is dropped.
    """
    inputs = q_THD, k_TJD, v_TJD, tiles_n3, scale, window or 0, sinks_H
    if torch.compiler.is_compiling():
        out_THD, _ = _compiled_forward(*inputs)
    elif torch.is_grad_enabled():
        out_THD = _Attention.apply(*inputs)
    else:
        out_THD, _ = _forward(*inputs)
    return out_THD


def sinks_gradient(dout_THD: Tensor, out_THD: Tensor, norm_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of sinks. ``norm_HT``: the logarithms of the softmax's denominators.

    A sink has no value, so its score gets -weight · (dout · out) from each row.
    """
    weights_HT = (sinks_H.float()[:, None] - norm_HT).exp()
    delta_TH = (dout_THD.float() * out_THD.float()).sum(2)
    return -(weights_HT * delta_TH.t()).sum(1).to(sinks_H.dtype)


def _forward(
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    tiles_n3: Tensor,
    scale: float,
    window: int,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from twinkle.model.decoder.packed_attention_kernels import attend  # needs Triton, which CUDA builds of torch have

    return attend(q_THD, k_TJD, v_TJD, tiles_n3, scale, window, sinks_H)


def _backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    out_THD: Tensor,
    norm_HT: Tensor,
    tiles_n3: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from twinkle.model.decoder.packed_attention_kernels import attend_backward

    return attend_backward(dout_THD.contiguous(), q_THD, k_TJD, v_TJD, out_THD, norm_HT, tiles_n3, scale, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out_THD, norm_HT = _forward(*inputs)
        _save(ctx, inputs, (out_THD, norm_HT))
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dout_THD, _backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_TJD, v_TJD, tiles_n3, ctx.scale, ctx.window, sinks_H = inputs
    ctx.save_for_backward(q_THD, k_TJD, v_TJD, *output, tiles_n3, sinks_H)


def _gradients(ctx: Any, dout_THD: Tensor, backward: Any) -> tuple[Tensor | None, ...]:
    q_THD, k_TJD, v_TJD, out_THD, norm_HT, tiles_n3, sinks_H = ctx.saved_tensors
    gradients = backward(dout_THD, q_THD, k_TJD, v_TJD, out_THD, norm_HT, tiles_n3, ctx.scale, ctx.window)
    dsinks_H = sinks_gradient(dout_THD, out_THD, norm_HT, sinks_H) if ctx.needs_input_grad[6] else None
    return *gradients, None, None, None, dsinks_H


# The same functions for compiled code. The compiler treats each as one opaque operation.

_compiled_forward = torch.library.custom_op("twinkle::packed_attention", _forward, mutates_args=())
_compiled_backward = torch.library.custom_op("twinkle::packed_attention_backward", _backward, mutates_args=())


@_compiled_forward.register_fake
def _(
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    tiles_n3: Tensor,
    scale: float,
    window: int,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
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
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_THD), torch.empty_like(k_TJD), torch.empty_like(v_TJD)


def _save_compiled(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs, output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout_THD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, dout_THD, _compiled_backward)


_compiled_forward.register_autograd(_differentiate, setup_context=_save_compiled)
