"""A causal depthwise convolution over packed sequences, whose first rows see no row of another sequence.

    y_t = Σ_s w_s x_{t−s},  s = 0 … W − 1, where row t − s is in the sequence of row t

Linear attention takes SiLU of it. On CUDA kernels of our own compute both, if they give the numbers of the formula.

Shapes: T rows, F features, W width of the window.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.model.decoder.fused.kernel_check import kernels_agree
from twinkle.model.decoder.linear_attention.bounds import Bounds

_COMPARED = (5, 1, 40, 2)  # the lengths of sequences on which kernels are compared with the formula
_CLOSE = 4e-6  # relative difference of their numbers, besides two roundings


def silu_convolution(x_TF: Tensor, weight_FW: Tensor, bounds: Bounds) -> Tensor:
    """Return SiLU(y) in the dtype of x. ``weight_FW``: as a Conv1d has it, with the weight of row t itself last."""
    if _runs_kernels(x_TF, weight_FW):
        keep = torch.is_grad_enabled() and x_TF.requires_grad
        out_TF: Tensor = _KernelConvolution.apply(x_TF, weight_FW, bounds.positions_T, keep)
        return out_TF
    return F.silu(causal_convolution(x_TF, weight_FW, bounds))


def _runs_kernels(x_TF: Tensor, weight_FW: Tensor) -> bool:
    """Return whether our kernels compute these rows. They give weights no gradient."""
    trained = weight_FW.requires_grad and torch.is_grad_enabled()
    return x_TF.is_cuda and not trained and _kernels_agree(x_TF.device, x_TF.dtype)


def causal_convolution(x_TF: Tensor, weight_FW: Tensor, bounds: Bounds) -> Tensor:
    """Return y in the dtype of x. ``weight_FW``: as a Conv1d has it, with the weight of row t itself last."""
    y_TF: Tensor = _Convolution.apply(x_TF, weight_FW, bounds)
    return y_TF


class _Convolution(torch.autograd.Function):
    """One product and one sum for each row of the window. Sums are in fp32, and rounded once."""

    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, weight_FW: Tensor, bounds: Bounds) -> Tensor:
        ctx.save_for_backward(x_TF, weight_FW)
        ctx.bounds = bounds
        taps_WF = weight_FW.float().t().flip(0).contiguous()
        x32_TF = x_TF.float()
        y_TF = x32_TF * taps_WF[0]
        for back, tap_F in _taps(taps_WF, len(x_TF)):
            y_TF[back:] += bounds.clear_first(x32_TF[:-back] * tap_F, back)
        return y_TF.to(x_TF.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_TF, weight_FW = ctx.saved_tensors
        bounds: Bounds = ctx.bounds
        taps_WF = weight_FW.float().t().flip(0).contiguous()
        dy32_TF = dy_TF.float()
        dx_TF = dy32_TF * taps_WF[0]
        for back, tap_F in _taps(taps_WF, len(x_TF)):
            dx_TF[:-back] += bounds.clear_first(dy32_TF[back:] * tap_F, back)
        if not ctx.needs_input_grad[1]:
            return dx_TF.to(x_TF.dtype), None, None
        dtaps_WF, x32_TF = torch.zeros_like(taps_WF), x_TF.float()
        dtaps_WF[0] = (x32_TF * dy32_TF).sum(0)
        for back, _ in _taps(taps_WF, len(x_TF)):
            dtaps_WF[back] = bounds.clear_first(x32_TF[:-back] * dy32_TF[back:], back).sum(0)
        return dx_TF.to(x_TF.dtype), dtaps_WF.flip(0).t().to(weight_FW.dtype), None


def _taps(taps_WF: Tensor, rows: int) -> list[tuple[int, Tensor]]:
    """Return the weights of earlier rows, each with how many rows it looks back; as far as there are rows."""
    return [(back, taps_WF[back]) for back in range(1, min(len(taps_WF), rows))]


class _KernelConvolution(torch.autograd.Function):
    """SiLU of the convolution on CUDA. The weight is not trained."""

    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, weight_FW: Tensor, positions_T: Tensor, keep: bool) -> Tensor:
        from twinkle.model.decoder.linear_attention.convolution_kernels import silu_of_convolution  # needs Triton

        weight_FW = weight_FW.contiguous()
        out_TF, y_TF = silu_of_convolution(x_TF.contiguous(), weight_FW, positions_T, keep=keep)
        ctx.save_for_backward(y_TF, weight_FW, positions_T)
        return out_TF

    @staticmethod
    def backward(ctx: Any, dout_TF: Tensor) -> tuple[Tensor, None, None, None]:
        from twinkle.model.decoder.linear_attention.convolution_kernels import gradient_of_rows

        return gradient_of_rows(dout_TF.contiguous(), *ctx.saved_tensors), None, None, None


@functools.cache
def _kernels_agree(device: torch.device, dtype: torch.dtype) -> bool:
    limit = _CLOSE + 2 * torch.finfo(dtype).eps
    return kernels_agree("convolutions are computed without our kernels", lambda: _both(device, dtype), limit)


def _both(device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return the result and the gradient of the kernels, each with that of the formula in fp32."""
    generator, bounds = torch.Generator().manual_seed(0), Bounds.from_lengths(_COMPARED, device)
    x_TF, slopes_TF = torch.randn(2, sum(_COMPARED), 200, generator=generator).to(device, dtype)
    weight_FW = torch.randn(200, 4, generator=generator).to(device, dtype)
    x_TF, x32_TF = (each.requires_grad_() for each in (x_TF.clone(), x_TF.float().clone()))
    found = _KernelConvolution.apply(x_TF, weight_FW, bounds.positions_T, True)
    expected = F.silu(causal_convolution(x32_TF, weight_FW.float(), bounds))
    (of_found,) = torch.autograd.grad(found, x_TF, slopes_TF)
    (of_expected,) = torch.autograd.grad(expected, x32_TF, slopes_TF.float())
    return [(found, expected), (of_found, of_expected)]
