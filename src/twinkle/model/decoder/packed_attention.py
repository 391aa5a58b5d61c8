"""Our own attention kernels as differentiable functions, for eager and for compiled code.

Shapes: T tokens, N sequences, H query heads, J key/value heads, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor

HEAD_SIZES = (64, 128)  # the sizes for which the kernels were measured


def attend(q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, ends_N1: Tensor, longest: int, scale: float) -> Tensor:
    """Compute causal attention within each sequence: a token sees itself and the tokens before it.

    All tensors must be contiguous.
    """
    inputs = q_THD, k_TJD, v_TJD, ends_N1, longest, scale
    if torch.compiler.is_compiling():
        out_THD, _ = _compiled_forward(*inputs)
    elif torch.is_grad_enabled():
        out_THD = _Attention.apply(*inputs)
    else:
        out_THD, _ = _forward(*inputs)
    return out_THD


def _forward(
    q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, ends_N1: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    from twinkle.model.decoder.packed_attention_kernels import attend  # needs Triton, which CUDA builds of torch have

    return attend(q_THD, k_TJD, v_TJD, ends_N1, longest, scale)


def _backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    out_THD: Tensor,
    norm_HT: Tensor,
    ends_N1: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from twinkle.model.decoder.packed_attention_kernels import attend_backward

    saved = q_THD, k_TJD, v_TJD, out_THD, norm_HT, ends_N1
    return attend_backward(dout_THD.contiguous(), *saved, longest, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q_THD, k_TJD, v_TJD, ends_N1, ctx.longest, ctx.scale = inputs
        out_THD, norm_HT = _forward(*inputs)
        ctx.save_for_backward(q_THD, k_TJD, v_TJD, out_THD, norm_HT, ends_N1)
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TJD, v_TJD, out_THD, norm_HT, ends_N1 = ctx.saved_tensors
        found = _backward(dout_THD, q_THD, k_TJD, v_TJD, out_THD, norm_HT, ends_N1, ctx.longest, ctx.scale)
        return *found, None, None, None


# The same functions for compiled code. The compiler treats each as one opaque operation.

_compiled_forward = torch.library.custom_op("twinkle::packed_attention", _forward, mutates_args=())
_compiled_backward = torch.library.custom_op("twinkle::packed_attention_backward", _backward, mutates_args=())


@_compiled_forward.register_fake
def _(
    q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, ends_N1: Tensor, longest: int, scale: float
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
    ends_N1: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_THD), torch.empty_like(k_TJD), torch.empty_like(v_TJD)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_TJD, v_TJD, ends_N1, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(q_THD, k_TJD, v_TJD, *output, ends_N1)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout_THD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_compiled_backward(dout_THD, *ctx.saved_tensors, ctx.longest, ctx.scale), None, None, None


_compiled_forward.register_autograd(_differentiate, setup_context=_save)
