"""RMS norms as one kernel.

Model files write the norm out in half a dozen elementwise steps, each a pass over memory and, in training, another
tensor kept. torch has a fused one. A module is replaced only if the fused norm gives the same numbers on a probe.
"""

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
        return F.rms_norm(x, self.weight_H.shape, self.weight_H, self.eps)


def fuse_norms(model: nn.Module) -> int:
    """Replace the RMS norms of a model; returns how many."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)
                replaced += 1
    return replaced


def _fused(module: nn.Module) -> FusedRmsNorm | None:
    """The fused twin of a norm, or None if this is not one we can replace (Gemma's adds 1 to its weight in fp32)."""
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


@torch.no_grad()
def _agree(module: nn.Module, fused: FusedRmsNorm, weight_H: Tensor) -> bool:
    """Equal on small values, where eps counts, and on ordinary ones; up to one rounding of the compute type."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(weight_H), generator=generator)
    probe = torch.cat([x, x * fused.eps**0.5]).to(weight_H)
    tolerance = 4 * torch.finfo(weight_H.dtype).eps
    return torch.allclose(module(probe).float(), fused(probe).float(), rtol=tolerance, atol=tolerance)
