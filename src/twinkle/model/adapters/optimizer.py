"""Adam on one adapter's flat row: torch's own function, with all hyper-parameters passed at each step."""

import math

import torch
from torch import Tensor
from torch.optim.adam import adam

from twinkle.errors import NonFiniteError
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.types import AdamParams

_PIECE = 512  # numbers of a gradient whose norm is computed in fp32


def adam_step(adapter: Adapter, params: AdamParams, *, decoupled: bool = True) -> dict[str, float]:
    """Take one step with the accumulated gradient, then drop the gradient. Return metrics.

    Without a gradient nothing changes, and the metrics contain ``no_gradient:max``. With ``decoupled`` the weight decay
    shrinks the weights (AdamW); otherwise it is added to the gradient (Adam).
    """
    gradient_P = adapter.gradient_P
    if gradient_P is None:
        return {"unclipped_grad_l2:mean": 0.0, "no_gradient:max": 1.0}
    norm = gradient_norm(gradient_P)
    if not math.isfinite(norm):
        raise NonFiniteError(
            f"the accumulated gradient of adapter {adapter.adapter_id!r} has norm {norm}: no step taken"
        )
    if params.grad_clip_norm > 0:
        # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6
        gradient_P = gradient_P * min(1.0, params.grad_clip_norm / (norm + 1e-6))
    adam(
        [adapter.weights_P],
        [gradient_P],
        [adapter.exp_avg_P],
        [adapter.exp_avg_sq_P],
        [],
        [torch.full((), float(adapter.step), device=gradient_P.device)],  # made there: a copy would wait for the device
        fused=True,
        amsgrad=False,
        decoupled_weight_decay=decoupled,
        beta1=params.beta1,
        beta2=params.beta2,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        eps=params.eps,
        maximize=False,
    )
    adapter.step += 1
    adapter.drop_gradient()
    adapter.refresh_compute_copy()
    return {"unclipped_grad_l2:mean": norm}


def gradient_norm(gradient_P: Tensor, norm_type: float = 2.0) -> float:
    """Return the norm of one adapter's gradient."""
    return float(norm_in_fp64(gradient_P, norm_type))


def norm_in_fp64(tensor: Tensor, norm_type: float) -> Tensor:
    """Return the norm of all numbers of a tensor as an fp64 scalar on the same device.

    On a CPU the norms of short pieces are computed in fp32 and combined in fp64: torch's reduction of one long row is
    slow in fp64 and inexact in fp32. Elsewhere torch adds up in a tree, which is exact enough in fp32, and an fp64 copy
    would take memory. Types smaller than fp32 are added up in fp32.
    """
    flat_N, dtype = tensor.reshape(-1), torch.promote_types(tensor.dtype, torch.float32)
    if tensor.device.type != "cpu":
        return torch.linalg.vector_norm(flat_N, norm_type, dtype=dtype).double()
    whole = flat_N.numel() // _PIECE * _PIECE
    norms = torch.linalg.vector_norm(flat_N[:whole].view(-1, _PIECE), norm_type, dim=1, dtype=dtype).double()
    if whole < flat_N.numel():
        norms = torch.cat([norms, torch.linalg.vector_norm(flat_N[whole:], norm_type, dtype=torch.float64)[None]])
    return torch.linalg.vector_norm(norms, norm_type)
