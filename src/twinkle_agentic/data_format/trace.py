"""Trace files: a readable JSON file for each trajectory, of a rollout or of a step that scores rows."""

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twinkle.data_format import user_data_get
from twinkle.utils.logger import get_logger

__all__ = ["TraceTest", "is_trace_name", "judged", "store_trace", "trace_fields"]

TraceTest = Callable[[Any], bool]  # a callback of the user: whether to store a trajectory, or whether it succeeded

# Tokens and tensors, which nobody reads and which would make the files large.
_NOT_TRACED = {
    "attention_mask",
    "image_grid_thw",
    "input_ids",
    "labels",
    "logprobs",
    "mm_token_type_ids",
    "pixel_values",
    "position_ids",
}
_NAME = re.compile(r"(?:step\d{6,}-)?(?:ok|fail|unjudged)-.{1,200}\.json")
_LONGEST_ID = 64


def judged(callback: TraceTest, trajectory: Mapping[str, Any], name: str) -> bool:
    """Return what a callback says of a trajectory. One that raises is logged, and counts as False."""
    try:
        return bool(callback(trajectory))
    except Exception:  # noqa: BLE001 - a trace must not end a training run
        get_logger().warning("%s raised; the trajectory counts as not wanted or failed", name, exc_info=True)
        return False


def trace_fields(trajectory: Mapping[str, Any], success: bool | None) -> dict[str, Any]:
    """Return the fields that every trace has."""
    return {
        "trajectory": {name: value for name, value in trajectory.items() if name not in _NOT_TRACED},
        "ground_truth": _user_value(trajectory, "ground_truth", ""),
        "stop_reason": trajectory.get("stop_reason"),
        "truncated": bool(trajectory.get("truncated")),
        "success": success,
    }


def store_trace(folder: Path, step: int | None, number: int, trace: Mapping[str, Any]) -> None:
    """Write a trace to ``ok-<id>.json``, ``fail-<id>.json`` or, without a judgement, ``unjudged-<id>.json``.

    With a step, ``step000007-`` stands before the name. The id is ``id`` or ``prompt_id`` of the trajectory's
    ``user_data``, or the time in milliseconds and the number of the trajectory in its call. A file is never
    overwritten: a second one of the same name gets ``-2`` after its id.
    """
    verdict = {None: "unjudged", True: "ok", False: "fail"}[trace["success"]]
    name = f"{'' if step is None else f'step{step:06d}-'}{verdict}-{_trace_id(trace['trajectory'], number)}"
    text = json.dumps(trace, ensure_ascii=False, indent=2, default=_plain)
    attempt = 1
    while True:
        path = folder / (f"{name}.json" if attempt == 1 else f"{name}-{attempt}.json")
        try:
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{text}\n")
        except FileExistsError:
            attempt += 1
        else:
            return


def is_trace_name(name: str) -> bool:
    """Return whether a file has a name that :func:`store_trace` gives."""
    return _NAME.fullmatch(name) is not None


def _trace_id(trajectory: Mapping[str, Any], number: int) -> str:
    values = (_user_value(trajectory, name, None) for name in ("id", "prompt_id"))
    given = next((value for value in values if value not in (None, "")), None)
    if given is None:
        return f"{time.time_ns() // 1_000_000}-{number}"
    return re.sub(r"[^A-Za-z0-9_.-]", "_", str(given))[:_LONGEST_ID]


def _user_value(trajectory: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a value of ``user_data``, which is a list of pairs or, in rows that a script makes, a dict."""
    given = trajectory.get("user_data")
    return given.get(name, default) if isinstance(given, Mapping) else user_data_get(given, name, default)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
