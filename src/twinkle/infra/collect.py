"""Combine the results of a call on several workers into one result. The value of ``collect`` says how:

none           the list of all results, or the result itself if there is one worker
flatten        one list, array or tensor with the items of all workers
mean, avg      the mean over workers; for dicts the mean of each key (a list of the values if they are not numbers)
sum            the sum over workers; for dicts the sum of each key, with the same exception
first          the result of the first worker
last_pp        the list of the results of the last pipeline stage
last_pp_first  the first result of the last pipeline stage
function       ``fn(results, device_mesh=mesh)``

If all workers return tuples of one length and ``collect`` is not a function, each position of the tuple is collected
separately.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Number
from typing import Any, Literal

import numpy as np

from twinkle.errors import InvalidInputError
from twinkle.infra.device_mesh import DeviceMesh

__all__ = ["Collect", "Origin", "check_collect", "collect_results"]

Named = Literal["none", "flatten", "mean", "avg", "sum", "first", "last_pp", "last_pp_first"]
Collect = Named | Callable[..., Any]


@dataclass(frozen=True)
class Origin:
    """The call that a result comes from: component, group, method, and the worker numbers that run it.

    ``of`` is the number of workers in the group.
    """

    component: str
    group: str
    method: str
    workers: tuple[int, ...]
    of: int


def check_collect(collect: Collect) -> None:
    if not callable(collect) and collect not in _COLLECTORS:
        raise InvalidInputError("collect", collect, f"{', '.join(map(repr, _COLLECTORS))} or a function")


def collect_results(collect: Collect, results: list[Any], mesh: DeviceMesh, workers: Sequence[int], of: int) -> Any:
    """Return what the driver gets for the ``results`` of the worker numbers ``workers``; ``of`` is the group's size."""
    if not results:
        return results
    if callable(collect):
        return collect(results, device_mesh=mesh)
    if all(isinstance(result, tuple) for result in results) and len({len(result) for result in results}) == 1:
        columns = [list(column) for column in zip(*results, strict=True)]
        return tuple(collect_results(collect, column, mesh, workers, of) for column in columns)
    if collect in ("last_pp", "last_pp_first"):
        results = _of_last_stage(results, mesh, workers, of)
    return _COLLECTORS[collect](results)


def _of_last_stage(results: list[Any], mesh: DeviceMesh, workers: Sequence[int], of: int) -> list[Any]:
    step = mesh.world_size // of
    last = set(mesh.get_pp_last_ranks())
    kept = [result for worker, result in zip(workers, results, strict=True) if worker * step in last]
    return kept or results[:1]


def _all(results: list[Any]) -> Any:
    return results[0] if len(results) == 1 else results


def _flatten(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, list):
        return list(chain.from_iterable(results))
    if isinstance(first, np.ndarray):
        return np.concatenate(results)
    if type(first).__module__ == "torch":
        from twinkle.infra.tensor_collect import concatenated

        return concatenated(results)
    raise InvalidInputError("result to flatten", first, "lists, arrays or tensors")


def _mean(results: list[Any]) -> Any:
    return _reduced(results, np.mean, "mean")


def _sum(results: list[Any]) -> Any:
    return _reduced(results, np.sum, "sum")


def _reduced(results: list[Any], reduce: Callable[..., Any], name: str) -> Any:
    if all(isinstance(result, dict) for result in results):
        keys = dict.fromkeys(key for result in results for key in result)
        columns = {key: [result[key] for result in results if key in result] for key in keys}
        return {key: _reduced(v, reduce, name) if _is_numeric(v) else v for key, v in columns.items()}
    if not _is_numeric(results):
        raise InvalidInputError(f"result to take the {name} of", results[0], "numbers, arrays or dicts of them")
    value = reduce([np.asarray(result) for result in results], axis=0)
    return value.item() if np.ndim(value) == 0 else value


def _is_numeric(values: list[Any]) -> bool:
    return all(isinstance(value, Number | np.ndarray) or type(value).__module__ == "torch" for value in values)


def _first(results: list[Any]) -> Any:
    return results[0]


_COLLECTORS: dict[str, Callable[[list[Any]], Any]] = {
    "none": _all,
    "flatten": _flatten,
    "mean": _mean,
    "avg": _mean,
    "sum": _sum,
    "first": _first,
    "last_pp": list,
    "last_pp_first": _first,
}
