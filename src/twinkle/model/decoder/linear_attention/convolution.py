"""A causal depthwise convolution over packed sequences, whose first rows see no row of another sequence.

    y_t = Σ_s w_s x_{t−s},  s = 0 … W − 1, where row t − s is in the sequence of row t

Shapes: T rows, F features, W width of the window.
"""

from typing import Any

import torch
from torch import Tensor

from twinkle.model.decoder.linear_attention.bounds import Bounds


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
