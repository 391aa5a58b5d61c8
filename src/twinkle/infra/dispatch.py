"""Divide the arguments of a call among workers. The value of ``dispatch`` says how:

all       every worker gets all arguments unchanged
slice     every argument that is a list is divided into as many contiguous parts as there are workers
slice_dp  every list and tensor, also inside dicts, is divided into as many parts as the mesh divides a batch into;
          workers that differ only in their tensor, pipeline or context parallel rank get the same part
function  ``fn(n_workers, i, args, kwargs, device_mesh=mesh)`` returns the i-th worker's args and kwargs
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from twinkle.errors import InvalidInputError
from twinkle.infra.device_mesh import DeviceMesh

__all__ = ["Arguments", "Dispatch", "Share", "check_dispatch", "dispatch_arguments", "shares"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Dispatch = Literal["all", "slice", "slice_dp"] | Callable[..., Arguments]


@dataclass(frozen=True)
class Share:
    """One worker's share of a call: part ``index`` of ``count``; of a batch, part ``data_index`` of ``data_count``."""

    index: int
    count: int
    data_index: int
    data_count: int
    mesh: DeviceMesh


def check_dispatch(dispatch: Dispatch) -> None:
    if not callable(dispatch) and dispatch not in ("all", "slice", "slice_dp"):
        raise InvalidInputError("dispatch", dispatch, "'all', 'slice', 'slice_dp' or a function")


def shares(mesh: DeviceMesh, workers: Sequence[int], of: int) -> list[Share]:
    """Return the share of each of the worker numbers ``workers``; ``of`` is the group's size.

    If the mesh has more ranks than there are workers, a worker's share is that of the first of its ranks.
    """
    step = mesh.world_size // of
    data_ranks = [mesh.get_data_rank_from_global_rank(worker * step) for worker in workers]
    parts = sorted(set(data_ranks))
    return [
        Share(index, len(workers), parts.index(data_rank), len(parts), mesh)
        for index, data_rank in enumerate(data_ranks)
    ]


def dispatch_arguments(dispatch: Dispatch, share: Share, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return one worker's arguments."""
    if callable(dispatch):
        return dispatch(share.count, share.index, args, kwargs, device_mesh=share.mesh)
    if dispatch == "all":
        return args, kwargs
    cut = _list_part if dispatch == "slice" else _batch_part
    return tuple(cut(value, share) for value in args), {name: cut(value, share) for name, value in kwargs.items()}


def _list_part(value: Any, share: Share) -> Any:
    return value[_part(len(value), share.index, share.count)] if isinstance(value, list) else value


def _batch_part(value: Any, share: Share) -> Any:
    if isinstance(value, dict):
        return {key: _batch_part(item, share) for key, item in value.items()}
    if isinstance(value, list) or _is_batched_tensor(value):
        rows = len(value)
        if 0 < rows < share.data_count:
            allowed = (
                f"none or at least {share.data_count} rows: every data-parallel worker gets one or more (a loader's "
            )
            allowed += "min_batch_size or drop_last keeps short batches away)"
            raise InvalidInputError("batch", f"{rows} rows", f"{allowed}. Batch too small")
        return value[_part(rows, share.data_index, share.data_count)]
    return value


def _is_batched_tensor(value: Any) -> bool:
    torch = cast("Any", sys.modules.get("torch"))  # if torch is not loaded, no tensor exists
    return torch is not None and isinstance(value, torch.Tensor) and value.ndim > 0


def _part(total: int, index: int, count: int) -> slice:
    size, extra = divmod(total, count)
    start = index * size + min(index, extra)
    return slice(start, start + size + (index < extra))
