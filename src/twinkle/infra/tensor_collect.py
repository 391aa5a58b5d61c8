"""Merge the model outputs of several workers into one output."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from twinkle.infra.device_mesh import DeviceMesh

__all__ = ["collect_tensor_dict", "concatenated", "distinct_outputs", "on_host"]

_PADDING = -200  # no label, no token and hardly a log-probability is −200


def collect_tensor_dict(outputs: Sequence[Mapping[str, Any]], device_mesh: "DeviceMesh") -> dict[str, Any]:
    """Merge the outputs key by key, using one output for each part of a batch where several ranks had the same rows.

    Lists are concatenated. Tensors and arrays of different lengths are padded at their ends with −200 and concatenated
    along the first dimension; so are lists of tensors, where a tensor of one dimension is one row. Dicts are merged key
    by key. Other values become lists, except that ``loss`` is averaged. A single output is returned unchanged.
    """
    if not outputs:
        return {}
    if len(outputs) == 1:
        return dict(outputs[0])
    kept = distinct_outputs(outputs, device_mesh)
    merged = _merged(kept)
    if "loss" in merged:
        losses = [torch.as_tensor(output["loss"], dtype=torch.float64).mean() for output in kept if "loss" in output]
        merged["loss"] = torch.stack(losses).mean().item()
    return merged


def distinct_outputs(outputs: Sequence[Any], device_mesh: "DeviceMesh") -> list[Any]:
    """Return one output for each part of a batch; ranks that work on the same part have the same output."""
    step = device_mesh.world_size // len(outputs)
    ranks = set(device_mesh.get_collect_ranks())
    return [output for worker, output in enumerate(outputs) if worker * step in ranks]


def concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors))


def on_host(value: Any) -> Any:
    """Return ``value`` with its tensors, also in dicts and lists, in host memory: others may not have the device."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    return [on_host(item) for item in value] if isinstance(value, list) else value


def _merged(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for output in outputs for key in output)
    return {key: _joined([output[key] for output in outputs if key in output]) for key in keys}


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return _merged(values)
    if isinstance(first, list):
        items = [item for value in values for item in value]
        tensors = items and all(isinstance(item, torch.Tensor) for item in items)
        return _padded([item[None] if item.ndim == 1 else item for item in items]) if tensors else items
    if isinstance(first, torch.Tensor):
        return _padded(values)
    if isinstance(first, np.ndarray):
        return _padded([torch.from_numpy(value) for value in values]).numpy()
    return values


def _padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows into one tensor; every dimension but the first is padded to the largest size."""
    dims = max(1, max(tensor.ndim for tensor in tensors))
    rows = [tensor.reshape((1,) * (dims - tensor.ndim) + tensor.shape) for tensor in tensors]
    sizes = [max(row.shape[dim] for row in rows) for dim in range(1, dims)]
    whole = rows[0].new_full((sum(row.shape[0] for row in rows), *sizes), _PADDING)
    start = 0
    for row in rows:
        place = (slice(start, start + row.shape[0]), *(slice(size) for size in row.shape[1:]))
        whole[place] = row
        start += row.shape[0]
    return whole
