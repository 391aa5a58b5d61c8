"""Trace files of scored rows: one JSON file for each row, in the form of the rollouts' traces."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from twinkle.data_format import user_data_get
from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.utils import Row, move_aside

__all__ = ["TraceFolder"]

RowTest = Callable[[Row], bool]

# Tensors and other data of a model, which a trace leaves out.
_NOT_TRACED = frozenset(
    (
        "attention_mask",
        "image_grid_thw",
        "input_ids",
        "labels",
        "logprobs",
        "mm_token_type_ids",
        "pixel_values",
        "position_ids",
    )
)
_TRACE_NAME = re.compile(r"(?:step\d{6}-)?(?:ok|fail)-.{1,200}\.json")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST_ID = 64


class TraceFolder:
    """Writes ``ok-<id>.json`` and ``fail-<id>.json``. The id is ``id`` or ``prompt_id`` of a row's ``user_data``.

    A folder with traces of an earlier run is renamed to ``<name>.1``, ``.2`` …. A folder with other files is refused.
    trace_callback: says whether a row is stored (None: every row). success_callback: says whether it is called ok
    (None: if the row was kept). If a callback raises, the row is not stored, or is called fail.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        trace_callback: RowTest | None = None,
        success_callback: RowTest | None = None,
    ) -> None:
        self.path = Path(path)
        self._trace_callback = trace_callback
        self._success_callback = success_callback
        _prepare(self.path)

    def write(self, number: int, row: Row, kept: bool, rounds: Sequence[Mapping[str, Any]]) -> None:
        """Write the trace of a row. ``rounds``: the scores of its rounds; ``number``: its place in the call."""
        if self._trace_callback is not None and not _holds(self._trace_callback, row):
            return
        success = kept if self._success_callback is None else _holds(self._success_callback, row)
        trace = {
            "trajectory": {key: value for key, value in row.items() if key not in _NOT_TRACED},
            "ground_truth": user_data_get(row.get("user_data"), "ground_truth", ""),
            "stop_reason": row.get("stop_reason"),
            "truncated": bool(row.get("truncated")),
            "success": success,
            "rounds": list(rounds),
        }
        text = json.dumps(trace, ensure_ascii=False, indent=2, default=str)
        self._write(f"{'ok' if success else 'fail'}-{_id(row, number)}", text)

    def _write(self, name: str, text: str) -> None:
        """Write a new file. Rows with equal ids get a number, so that none overwrites another."""
        attempt = 1
        while True:
            path = self.path / (f"{name}.json" if attempt == 1 else f"{name}-{attempt}.json")
            try:
                with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
                return
            except FileExistsError:
                attempt += 1


def _prepare(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise InvalidInputError("trace_dir", str(path), "a folder; this is a file")
    names = [entry.name for entry in path.iterdir()] if path.exists() else []
    others = sorted(name for name in names if not _TRACE_NAME.fullmatch(name))
    if others:
        raise InvalidInputError(
            "trace_dir", str(path), f"a new folder, or one with traces only; this one has {', '.join(others[:3])}"
        )
    if names:
        move_aside(path)
    path.mkdir(parents=True, exist_ok=True)


def _holds(test: RowTest, row: Row) -> bool:
    try:
        return bool(test(row))
    except Exception:  # noqa: BLE001  # a callback that fails must not stop the scoring
        return False


def _id(row: Row, number: int) -> str:
    data = row.get("user_data")
    given = user_data_get(data, "id") or user_data_get(data, "prompt_id")
    if given is None or given == "":
        return f"{time.time_ns() // 1_000_000}-{number}"
    return _UNSAFE.sub("_", str(given))[:_LONGEST_ID]
