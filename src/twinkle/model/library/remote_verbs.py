"""How the verbs of a model run on a worker group: which rows each worker gets, and how the parts become one answer.

The workers train together, so every verb runs on all of them. The rows of a batch are shared out by the mesh, in their
order; where there are fewer rows than ranks, some have none and go along all the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from twinkle.infra import remote_function
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.dispatch import Arguments
from twinkle.infra.tensor_collect import collect_tensor_dict


def own_rows(
    n_workers: int, i: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, device_mesh: DeviceMesh
) -> Arguments:
    """The i-th worker's part of ``inputs``, and of every list, array and tensor with one entry for each of its rows.

    Those may also be in dicts, as the outputs of another pass are.
    """
    inputs = kwargs.get("inputs")
    rows = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(rows, Sequence):
        return args, kwargs  # the verb says what is wrong with it
    data_rank = device_mesh.get_data_rank_from_global_rank(i * (device_mesh.world_size // n_workers))
    place = device_mesh.get_slice(len(rows), data_rank)
    others = {name: _part(value, len(rows), place) for name, value in kwargs.items() if name != "inputs"}
    return args, {**others, "inputs": list(rows[place])}


def joined_outputs(outputs: Sequence[Mapping[str, Any]], *, device_mesh: DeviceMesh) -> dict[str, Any]:
    """Those of all rows, in their order; see :func:`collect_tensor_dict` for their padding.

    A "loss" that is a sum over tokens is added up, as one process would have it; others are averaged over the workers
    that had rows.
    """
    merged = collect_tensor_dict(outputs, device_mesh)
    if len(outputs) > 1 and "loss" in merged:
        merged["num_tokens"] = sum(output["num_tokens"] for output in outputs)
        losses = [output["loss"] for output in outputs if _has_rows(output)]
        merged["loss"] = sum(losses) if merged["num_tokens"] > 0 else sum(losses) / max(len(losses), 1)
    return merged


# Passes. Their outputs are promises unless the program wants results at once.
on_rows = remote_function(dispatch=own_rows, collect=joined_outputs)
# What the driver need not wait for; what fails shows at the next call.
promised = remote_function(dispatch="all", collect="first")
at_once = remote_function(dispatch="all", collect="first", lazy_collect=False)
averaged = remote_function(dispatch="all", collect="mean")
by_first = remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)


def _part(value: Any, rows: int, place: slice) -> Any:
    if isinstance(value, Mapping):
        return {name: _part(item, rows, place) for name, item in value.items()}
    is_array = isinstance(value, Tensor | np.ndarray) and value.ndim > 0
    if (is_array or isinstance(value, list | tuple)) and len(value) == rows:
        return value[place]
    return value


def _has_rows(output: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and value.dim() > 0 and len(value) > 0 for value in output.values())
