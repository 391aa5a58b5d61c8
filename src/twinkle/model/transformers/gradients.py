"""Gradients of parameters that several ranks train together, sharded or whole.

Each rank accumulates its own gradients; they are added up over ranks when the whole gradient is needed. (FSDP has
already added up the gradients of shards within their replica.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from twinkle.model.adapters.optimizer import norm_in_fp64
from twinkle.model.parallel import Parallelism, Ranks, add_up_all


def unite(parameters: Sequence[nn.Parameter], parallel: Parallelism) -> None:
    """Add up the gradients of all ranks. A parameter that has no gradient on any rank stays without one."""
    _unite([each for each in parameters if not isinstance(each, DTensor)], parallel.ranks)
    _unite([each for each in parameters if isinstance(each, DTensor)], parallel.replicas)


def leave_to_first(parameters: Sequence[nn.Parameter], parallel: Parallelism) -> None:
    """Drop, on all ranks but the first, gradients that have been added up over ranks.

    Otherwise they would count once per rank when they are added up again.
    """
    for parameter in parameters:
        ranks = parallel.replicas if isinstance(parameter, DTensor) else parallel.ranks
        if ranks.number > 0:
            parameter.grad = None


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float, parallel: Parallelism) -> float:
    """Scale the gradients down to a norm of at most ``max_norm``, and return their norm before that.

    All ranks must call it. The norm is that of all shards together. It is summed in fp64 over tensors and ranks, so
    that it does not depend on how the model is sharded.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = _norm([each for each in gradients if not isinstance(each, DTensor)], norm_type)
    shards = parallel.shards.gather(_norm([_own(each) for each in gradients if isinstance(each, DTensor)], norm_type))
    norm = torch.linalg.vector_norm(torch.tensor([whole, *shards], dtype=torch.float64), norm_type)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.float())
    return float(norm)


def _norm(tensors: Sequence[Tensor], norm_type: float) -> float:
    """Return the norm of all tensors of this rank together; they are on one device, which is synchronized once."""
    norms = [norm_in_fp64(each, norm_type) for each in tensors if each.numel()]  # a rank's shard may be empty
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0


@torch.no_grad()
def _unite(parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
    if ranks.size == 1 or not parameters:
        return
    counts = torch.tensor([parameter.grad is not None for parameter in parameters]).int()
    ranks.add_up(counts)
    trained = [parameter for parameter, count in zip(parameters, counts.tolist(), strict=True) if count]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    add_up_all(ranks, [_own(parameter.grad) for parameter in trained if parameter.grad is not None])


def _own(gradient: Tensor) -> Tensor:
    """Return the part of a gradient that this rank holds."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
