"""RMS norms in few passes over memory.

Model code computes the norm in half a dozen elementwise steps. Each step is a pass over memory and, in training, keeps
another tensor; the derivative takes twice as many. torch has one kernel for it on CUDA; on CPU the closed form of the
derivative is three times as fast as autograd through the steps. A module is replaced only if its replacement gives the
same numbers on test data, up to a few roundings.

Shapes: T rows, H features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedRmsNorm(nn.Module):
    """``x / rms(x) · weight`` over the last dimension, computed in fp32 and rounded once."""

    def __init__(self, weight_H: Tensor, eps: float) -> None:
        super().__init__()
        self.weight_H = nn.Parameter(weight_H, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return F.rms_norm(x, self.weight_H.shape, self.weight_H, self.eps)
        return _RmsNorm.apply(x, self.weight_H, self.eps)


class CenteredRmsNorm(FusedRmsNorm):
    """``x / rms(x) · (1 + weight)``, computed in fp32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        weight_H = 1.0 + self.weight_H.float()
        if x.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return F.rms_norm(x.float(), weight_H.shape, weight_H, self.eps).to(x.dtype)
        return _RmsNorm.apply(x, weight_H, self.eps)


class _RmsNorm(torch.autograd.Function):
    """y = x·s·w with s = 1/√(mean(x²) + eps); dx = s·(g − x·s²·mean(g·x)) with g = dy·w.

    dw is the sum of dy·x·s over all rows; it is computed only where weights are trained.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x32_TH = x_TH.float()
        scale_T1 = torch.linalg.vecdot(x32_TH, x32_TH).div_(x_TH.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x_TH, weight_H, scale_T1)
        return (x32_TH * scale_T1).mul_(weight_H).to(x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_TH, weight_H, scale_T1 = ctx.saved_tensors
        x32_TH, dy32_TH = x_TH.float(), dy_TH.float()
        dweight_H = None
        if ctx.needs_input_grad[1]:
            products_TH = (dy32_TH * x32_TH).mul_(scale_T1)
            dweight_H = products_TH.flatten(0, -2).sum(0).to(weight_H.dtype)
        g_TH = dy32_TH * weight_H
        mean_T1 = torch.linalg.vecdot(g_TH, x32_TH).unsqueeze(-1) / x_TH.shape[-1]
        dx_TH = g_TH.mul_(scale_T1).addcmul_(x32_TH, mean_T1 * scale_T1**3, value=-1).to(x_TH.dtype)
        return dx_TH, dweight_H, None


def fuse_norms(model: nn.Module) -> int:
    """Replace the RMS norms of a model that have a fused equivalent, and return how many were replaced."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)
                replaced += 1
    return replaced


def _fused(module: nn.Module) -> FusedRmsNorm | None:
    """Return the fused equivalent of a norm, or None if it is not one that we can replace.

    Gemma's norm, for example, adds 1 to its weight in fp32.
    """
    parameters = dict(module.named_parameters())
    if not type(module).__name__.endswith("RMSNorm") or list(parameters) != ["weight"]:
        return None
    values = vars(module)
    eps = values.get("variance_epsilon", values.get("eps"))
    if not isinstance(eps, float):
        return None
    weight_H = parameters["weight"].detach()
    fused = FusedRmsNorm(weight_H, eps)
    return fused if _agree(module, fused, weight_H) else None


def _agree(module: nn.Module, fused: FusedRmsNorm, weight_H: Tensor) -> bool:
    """Return whether both norms give equal results, up to a few roundings of the dtype.

    They are compared on ordinary values and on small ones, where eps matters; both with and without gradients, since
    the fused norm uses different code for these.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(weight_H), generator=generator)
    probe = torch.cat([x, x * fused.eps**0.5]).to(weight_H)
    tolerance = 4 * torch.finfo(weight_H.dtype).eps
    with torch.no_grad():
        wanted, scored = module(probe).float(), fused(probe).float()
    with torch.enable_grad():
        trained = fused(probe).detach().float()
    return all(torch.allclose(each, wanted, rtol=tolerance, atol=tolerance) for each in (scored, trained))
