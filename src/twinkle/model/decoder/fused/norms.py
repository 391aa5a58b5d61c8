"""RMS norms in few passes over memory.

Model code computes the norm in half a dozen elementwise steps. Each step is a pass over memory and, in training, keeps
another tensor; the derivative takes twice as many. On CUDA one kernel of our own computes the norm and another one its
derivative; on CPU the closed form of the derivative is three times as fast as autograd through the steps. A module is
replaced only if its replacement gives the same numbers on test data, up to a few roundings.

Shapes: T rows, H features.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinkle.model.decoder.fused.kernel_check import kernels_agree

_LARGEST = 16384  # features that the kernels take
_CLOSE = 4e-6  # relative difference of the kernels' numbers from those of the formula, besides one rounding


class FusedRmsNorm(nn.Module):
    """``x / rms(x) · weight`` over the last dimension, computed in fp32 and rounded once."""

    offset = 0.0  # added to the weight

    def __init__(self, weight_H: Tensor, eps: float) -> None:
        super().__init__()
        self.weight_H = nn.Parameter(weight_H, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self._runs_kernels(x):
            return _KernelNorm.apply(x, None, self.weight_H, self.eps, self.offset)
        if x.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._by_torch(x)
        return _RmsNorm.apply(x, self._weight(), self.eps)

    def _runs_kernels(self, x: Tensor) -> bool:
        """Return whether our kernels compute the norm of x. They give weights no gradient."""
        if not x.is_cuda or torch.compiler.is_compiling() or x.shape[-1] > _LARGEST:
            return False
        trained = self.weight_H.requires_grad and torch.is_grad_enabled()
        return not trained and _kernels_agree(x.device, x.dtype)

    def _by_torch(self, x: Tensor) -> Tensor:
        if not self.offset:
            return F.rms_norm(x, self.weight_H.shape, self.weight_H, self.eps)
        weight_H = self._weight()
        return F.rms_norm(x.float(), weight_H.shape, weight_H, self.eps).to(x.dtype)

    def _weight(self) -> Tensor:
        return self.weight_H if not self.offset else self.offset + self.weight_H.float()


class CenteredRmsNorm(FusedRmsNorm):
    """``x / rms(x) · (1 + weight)``, computed in fp32 and rounded once."""

    offset = 1.0


class GatedRmsNorm(FusedRmsNorm):
    """``x / rms(x) · weight · SiLU(gate)``, computed in fp32 and rounded once."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        if self._runs_kernels(x):
            return _KernelNorm.apply(x, gate, self.weight_H, self.eps, self.offset)
        return _formula(x, gate, self.weight_H, self.eps, self.offset)


def _formula(x: Tensor, gate: Tensor | None, weight_H: Tensor, eps: float, offset: float) -> Tensor:
    normed = F.rms_norm(x.float(), weight_H.shape, offset + weight_H.float(), eps)
    return (normed if gate is None else normed * F.silu(gate.float())).to(x.dtype)


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


class _KernelNorm(torch.autograd.Function):
    """The norm on CUDA, with or without a gate. The weight is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight_H: Tensor, eps: float, offset: float) -> Tensor:
        from twinkle.model.decoder.fused.norm_kernels import rms_norm  # needs Triton, which CUDA builds of torch have

        x, gate = x.contiguous(), None if gate is None else gate.contiguous()
        ctx.save_for_backward(x, weight_H, *(() if gate is None else (gate,)))
        ctx.eps, ctx.offset = eps, offset
        return rms_norm(x, gate, weight_H, eps, offset)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from twinkle.model.decoder.fused.norm_kernels import rms_norm_gradient

        x, weight_H, *gates = ctx.saved_tensors
        gate = gates[0] if gates else None
        return *rms_norm_gradient(dy.contiguous(), x, gate, weight_H, ctx.eps, ctx.offset), None, None, None


@functools.cache
def _kernels_agree(device: torch.device, dtype: torch.dtype) -> bool:
    limit = _CLOSE + torch.finfo(dtype).eps
    return kernels_agree("norms are computed without our kernels", lambda: _both(device, dtype), limit)


def _both(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results and gradients of the kernels, each with that of the formula."""
    generator = torch.Generator().manual_seed(0)
    for width, gated, offset in ((128, False, 0.0), (2048, False, 1.0), (128, True, 0.0)):
        x, gate, slopes = (torch.randn(5, width, generator=generator).to(device, dtype) for _ in range(3))
        weight_H = torch.randn(width, generator=generator).to(device, dtype)
        inputs = [each.requires_grad_() for each in ((x, gate) if gated else (x,))]
        found, expected = (
            norm(x, gate if gated else None, weight_H, 1e-6, offset) for norm in (_KernelNorm.apply, _formula)
        )
        yield found, expected
        gradients = (torch.autograd.grad(each, inputs, slopes) for each in (found, expected))
        yield from zip(*gradients, strict=True)


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
    """Return the fused equivalent of a norm, or None if it is not one that we can replace."""
    kinds = _kinds(type(module).__name__)
    parameters = dict(module.named_parameters())
    if not kinds or list(parameters) != ["weight"]:
        return None
    values = vars(module)
    eps = values.get("variance_epsilon", values.get("eps"))
    if not isinstance(eps, float):
        return None
    weight_H = parameters["weight"].detach()
    return next((fused for fused in (kind(weight_H, eps) for kind in kinds) if _agree(module, fused, weight_H)), None)


def _kinds(name: str) -> Sequence[type[FusedRmsNorm]]:
    """Return what may replace a class of this name."""
    if name.endswith("RMSNormGated"):
        return (GatedRmsNorm,)
    return (FusedRmsNorm, CenteredRmsNorm) if name.endswith("RMSNorm") else ()


def _agree(module: nn.Module, fused: FusedRmsNorm, weight_H: Tensor) -> bool:
    """Return whether both norms give equal results, up to a few roundings of the dtype.

    They are compared on ordinary values and on small ones, where eps matters; both with and without gradients, since
    the fused norm uses different code for these.
    """
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 4, len(weight_H), generator=generator)
    probe = torch.cat([x, x * fused.eps**0.5]).to(weight_H)
    given = (probe, torch.cat([gate, gate]).to(weight_H)) if isinstance(fused, GatedRmsNorm) else (probe,)
    tolerance = 4 * torch.finfo(weight_H.dtype).eps
    with torch.no_grad():
        wanted, scored = module(*given).float(), fused(*given).float()
    with torch.enable_grad():
        trained = fused(*given).detach().float()
    return all(torch.allclose(each, wanted, rtol=tolerance, atol=tolerance) for each in (scored, trained))
