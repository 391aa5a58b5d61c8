"""Helpers for tensors that scripts import: move, copy, pad and join them, and log-probabilities of chosen entries."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.framework_util import to_local_tensor

__all__ = [
    "clone_state_dict_to_cpu",
    "pad_and_stack_tensors",
    "pad_sequence_to_length",
    "selective_log_softmax",
    "to_device",
]

T = TypeVar("T")


def to_device(data: T, device: str | int | torch.device, non_blocking: bool = False) -> T:
    """Return ``data`` with its tensors, also those in mappings, lists and tuples, on ``device``."""
    result: Any = data
    if isinstance(data, Tensor):
        result = data.to(device, non_blocking=non_blocking)
    elif isinstance(data, Mapping):
        moved = {key: to_device(value, device, non_blocking) for key, value in data.items()}
        result = moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
    elif isinstance(data, tuple) and hasattr(data, "_fields"):  # a named tuple takes its values one by one
        result = type(data)(*(to_device(value, device, non_blocking) for value in data))
    elif isinstance(data, list | tuple):
        result = type(data)(to_device(value, device, non_blocking) for value in data)
    return result


def clone_state_dict_to_cpu(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy whose tensors are in host memory and share nothing with the model. Sharded tensors become whole.

    All ranks must call it if a tensor is sharded.
    """
    return {
        name: to_local_tensor(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in state_dict.items()
    }


def pad_sequence_to_length(tensor: Tensor, max_seq_len: int, pad_value: float = 0.0, left_pad: bool = False) -> Tensor:
    """Return the tensor with its last dimension padded to ``max_seq_len``; a longer one is returned as it is."""
    lacking = max_seq_len - tensor.shape[-1]
    if lacking <= 0:
        return tensor
    return F.pad(tensor, (lacking, 0) if left_pad else (0, lacking), value=pad_value)


def pad_and_stack_tensors(tensors: Sequence[Tensor], pad_value: float = -200, concat: bool = True) -> Tensor:
    """Join tensors of different shapes: along their first dimension, or along a new one if ``concat`` is False.

    Missing dimensions are added at the front, and every dimension is padded at its end to the largest size. A single
    tensor is returned as it is.
    """
    if not tensors:
        raise InvalidInputError("tensors", [], "one tensor or more")
    if len(tensors) == 1:
        return tensors[0]
    dims = max(1, max(tensor.ndim for tensor in tensors))
    rows = [tensor.reshape((1,) * (dims - tensor.ndim) + tensor.shape) for tensor in tensors]
    sizes = [max(row.shape[dim] for row in rows) for dim in range(dims)]
    padded = []
    for row in rows:
        # F.pad takes pairs (before, after) from the last dimension to the first
        widths = [width for dim in reversed(range(dims)) for width in (0, sizes[dim] - row.shape[dim])]
        padded.append(F.pad(row, widths, value=pad_value))
    return torch.cat(padded) if concat else torch.stack(padded)


@overload
def selective_log_softmax(logits: Tensor, index: Tensor, return_entropy: Literal[False] = False) -> Tensor: ...


@overload
def selective_log_softmax(logits: Tensor, index: Tensor, return_entropy: Literal[True]) -> tuple[Tensor, Tensor]: ...


def selective_log_softmax(
    logits: Tensor, index: Tensor, return_entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log p(index) under softmax(logits), and with ``return_entropy`` also the entropy of each distribution.

    ``logits`` has one dimension more than ``index``: the vocabulary, its last one. Sequences (the first dimension) are
    computed one after another, so that the log-probabilities of a whole vocabulary exist for one of them at a time.
    """
    if logits.shape[:-1] != index.shape:
        raise InvalidInputError("index", f"shape {tuple(index.shape)}", f"that of logits, {tuple(logits.shape[:-1])}")
    parts = zip(logits, index, strict=True) if index.dim() > 1 else [(logits, index)]
    results = [_chosen_logps(part, chosen, return_entropy) for part, chosen in parts]
    logps = torch.stack([each for each, _ in results]).reshape(index.shape)
    if not return_entropy:
        return logps
    return logps, torch.stack([entropy for _, entropy in results]).reshape(index.shape)


def _chosen_logps(logits: Tensor, index: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (zeros unless they are wanted) of one sequence, or of one row of it."""
    full = with_entropy or logits.dtype not in (torch.float32, torch.float64)
    if not full:
        picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return picked - torch.logsumexp(logits, dim=-1), torch.zeros_like(picked)
    logps = F.log_softmax(logits, dim=-1)  # in half precision, logsumexp would be too coarse to subtract
    entropy = -(logps.exp() * logps).sum(dim=-1) if with_entropy else torch.zeros_like(logps[..., 0])
    return logps.gather(-1, index.unsqueeze(-1)).squeeze(-1), entropy
