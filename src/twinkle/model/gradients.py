"""Gradients of parameters that several ranks train together, in shards or whole.

Each rank adds to gradients of its own (those of shards are sums over their ranks already) until the whole is needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from twinkle.model.parallel import Parallelism, Ranks, add_up_all


def unite(parameters: Sequence[nn.Parameter], parallel: Parallelism) -> None:
    """Add up the gradients of all ranks. A parameter that has none anywhere gets none."""
    _unite([each for each in parameters if not isinstance(each, DTensor)], parallel.ranks)
    _unite([each for each in parameters if isinstance(each, DTensor)], parallel.replicas)


def leave_to_first(parameters: Sequence[nn.Parameter], parallel: Parallelism) -> None:
    """Of united gradients one rank keeps all, and the others go on with none: they can be added up once more."""
    for parameter in parameters:
        ranks = parallel.replicas if isinstance(parameter, DTensor) else parallel.ranks
        if ranks.number > 0:
            parameter.grad = None


def clip(parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> float:
    """The norm before clipping, that of all shards together."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients, norm_type)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


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
    """What this rank holds of it."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
