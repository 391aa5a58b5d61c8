"""Plain models whose delta nets compute query, key and value by three linear layers, so that PEFT can be on each."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class _Joined(nn.Module):
    """Takes the place of ``in_proj_qkv``: the three projections side by side. Their modules belong to the delta net."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self._net = (net,)  # in a tuple, so that it is not taken for a part of this module

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self._net[0], f"in_proj_{part}")(x) for part in "qkv"], -1)


def split_projections(model: PreTrainedModel) -> PreTrainedModel:
    """Replace each ``in_proj_qkv`` by ``in_proj_q``, ``in_proj_k`` and ``in_proj_v``, in place."""
    for net in list(model.modules()):
        joint = net._modules.get("in_proj_qkv")
        if type(joint) is not nn.Linear:
            continue
        sizes = [net.key_dim, net.key_dim, net.value_dim]
        for part, weight in zip("qkv", joint.weight.detach().split(sizes), strict=True):
            linear = nn.Linear(joint.in_features, len(weight), bias=False, dtype=weight.dtype)
            linear.weight = nn.Parameter(weight.clone())
            setattr(net, f"in_proj_{part}", linear)
        net.in_proj_qkv = _Joined(net)
    return model
