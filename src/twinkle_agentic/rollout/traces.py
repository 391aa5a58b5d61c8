"""Traces of rollouts: a readable file for each finished conversation."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.utils.logger import get_logger

__all__ = ["TraceWriter"]

Judge = Callable[[Mapping[str, Any]], bool]

# Tokens and tensors, which nobody reads and which would make the files large.
_NOT_TRACED = {
    "input_ids",
    "labels",
    "attention_mask",
    "position_ids",
    "logprobs",
    "pixel_values",
    "image_grid_thw",
    "mm_token_type_ids",
}


class TraceWriter:
    """Writes finished trajectories into a folder, one pretty-printed JSON file for each.

    The file is called ``ok-<id>.json`` or ``fail-<id>.json``, as ``success_callback`` judges the trajectory, or
    ``unjudged-<id>.json`` without one. With a step, ``step000007-`` stands before the name. The id is ``id`` or
    ``prompt_id`` of the trajectory's user_data, or the time in milliseconds and the number of the trajectory. A file is
    never overwritten: a second one of the same name gets ``-2`` after its id. ``trace_callback`` chooses the
    trajectories to store. A callback that raises is logged, and means "do not store" or "fail".
    """

    def __init__(
        self, trace_dir: str | Path | None, trace_callback: Judge | None, success_callback: Judge | None
    ) -> None:
        self._folder = None if trace_dir is None else Path(trace_dir)
        self._is_wanted = trace_callback
        self._is_success = success_callback

    def write(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        global_step: int | None,
        extras: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Store the trajectories. ``extras``: further fields of each trace."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        step = "" if global_step is None else f"step{global_step:06d}-"
        for index, trajectory in enumerate(trajectories):
            if self._is_wanted is not None and not _judged(self._is_wanted, trajectory, "trace_callback"):
                continue
            success = None
            if self._is_success is not None:
                success = _judged(self._is_success, trajectory, "success_callback")
            verdict = "unjudged" if success is None else "ok" if success else "fail"
            trace = {**_trace(trajectory, success), **(extras[index] if extras else {})}
            _store(self._folder, f"{step}{verdict}-{_trace_id(trajectory, index)}", trace)


def _judged(callback: Judge, trajectory: Mapping[str, Any], name: str) -> bool:
    try:
        return bool(callback(trajectory))
    except Exception:  # noqa: BLE001 - a trace must not end a training run
        get_logger().warning("%s raised; the trajectory counts as not wanted or failed", name, exc_info=True)
        return False


def _trace(trajectory: Mapping[str, Any], success: bool | None) -> dict[str, Any]:
    return {
        "trajectory": {name: value for name, value in trajectory.items() if name not in _NOT_TRACED},
        "ground_truth": _user_data(trajectory).get("ground_truth", ""),
        "stop_reason": trajectory.get("stop_reason"),
        "truncated": trajectory.get("truncated"),
        "success": success,
    }


def _user_data(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """Return user_data, pairs of names and values, as a dict; of equal names the first one counts."""
    given = trajectory.get("user_data") or ()
    if isinstance(given, Mapping):
        return dict(given)
    return {str(pair[0]): pair[1] for pair in reversed(given) if isinstance(pair, list | tuple) and len(pair) == 2}


def _trace_id(trajectory: Mapping[str, Any], index: int) -> str:
    data = _user_data(trajectory)
    given = next((data[name] for name in ("id", "prompt_id") if data.get(name) not in (None, "")), None)
    if given is None:
        return f"{time.time_ns() // 1_000_000}-{index}"
    return re.sub(r"[^A-Za-z0-9_.-]", "_", str(given))[:64]


def _store(folder: Path, name: str, trace: Mapping[str, Any]) -> None:
    text = json.dumps(trace, ensure_ascii=False, indent=2, default=_plain)
    number = 1
    while True:
        path = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")
        except FileExistsError:
            number += 1
        else:
            return


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
