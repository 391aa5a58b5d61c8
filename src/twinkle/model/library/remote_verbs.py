"""How the verbs of a model run on a worker group: which rows each worker gets, and how their results become one.

The workers train together, so verbs run on all of them (``upload_to_hub`` on the first only). The rows of a batch are
distributed over the ranks of the mesh in order; the ranks of a sequence group get the same rows. If there are fewer
rows than ranks, some ranks have none, but they call the verb all the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from twinkle.infra import remote_function
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.dispatch import Arguments
from twinkle.infra.tensor_collect import collect_tensor_dict, distinct_outputs


def own_rows(
    n_workers: int, i: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, device_mesh: DeviceMesh
) -> Arguments:
    """Return the arguments of worker i: its part of ``inputs``, and of other arguments with one entry per row.

    Such arguments are lists, tuples, arrays and tensors, also inside dicts (for example the outputs of another pass).
    """
    inputs = kwargs.get("inputs")
    rows = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(rows, Sequence):
        return args, kwargs  # the verb raises an error for it
    data_rank = device_mesh.get_data_rank_from_global_rank(i * (device_mesh.world_size // n_workers))
    place = device_mesh.get_slice(len(rows), data_rank)
    others = {name: _part(value, len(rows), place) for name, value in kwargs.items() if name != "inputs"}
    return args, {**others, "inputs": list(rows[place])}


def first_keeps(
    n_workers: int, i: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, device_mesh: DeviceMesh
) -> Arguments:
    """Return the arguments of worker i, with ``keep`` True for the first worker alone."""
    return args, {**kwargs, "keep": i == 0}


def joined_outputs(outputs: Sequence[Mapping[str, Any]], *, device_mesh: DeviceMesh) -> dict[str, Any]:
    """Join the outputs of all workers in the order of the rows; see :func:`collect_tensor_dict` for the padding.

    A "loss" that is a sum over tokens is added up, so that it is the same as in one process; a mean is averaged over
    the workers that had rows.
    """
    merged = collect_tensor_dict(outputs, device_mesh)
    if len(outputs) > 1 and "loss" in merged:
        different = distinct_outputs(outputs, device_mesh)
        merged["num_tokens"] = sum(output["num_tokens"] for output in different)
        losses = [output["loss"] for output in different if _has_rows(output)]
        merged["loss"] = sum(losses) if merged["num_tokens"] > 0 else sum(losses) / max(len(losses), 1)
    return merged


# Passes. They return before they are computed, with outputs that are resolved later, unless the program asks for
# results at once.
on_rows = remote_function(dispatch=own_rows, collect=joined_outputs)
# Verbs for which the driver does not wait; an error is raised by the next call.
promised = remote_function(dispatch="all", collect="first")
# Verbs for which the driver waits.
at_once = remote_function(dispatch="all", collect="first", lazy_collect=False)
# A number that is averaged over the workers.
averaged = remote_function(dispatch="all", collect="mean")
# Weights that travel on to other workers: all workers gather them, the first one keeps them, and the driver does not
# fetch them.
gathered = remote_function(dispatch=first_keeps, collect="first", lazy_collect=True)
# Verbs that only the first worker runs, and for which the driver waits.
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
