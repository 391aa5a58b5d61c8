"""The traces of scored rows: one JSON file for each row, in the form of the rollouts' traces."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from twinkle.errors import InvalidInputError
from twinkle_agentic.data_format.trace import TraceTest, is_trace_name, judged, store_trace, trace_fields
from twinkle_agentic.preprocessor.utils import Row, move_aside

__all__ = ["TraceFolder"]


class TraceFolder:
    """Writes ``ok-<id>.json`` and ``fail-<id>.json``. The id is ``id`` or ``prompt_id`` of a row's ``user_data``.

    A folder with traces of an earlier run is renamed to ``<name>.1``, ``.2`` …. A folder with other files is refused.
    trace_callback: says whether a row is stored (None: every row). success_callback: says whether it is called ok
    (None: if the row was kept). If a callback raises, this is logged, and the row is not stored, or is called fail.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        trace_callback: TraceTest | None = None,
        success_callback: TraceTest | None = None,
    ) -> None:
        self.path = Path(path)
        self._trace_callback = trace_callback
        self._success_callback = success_callback
        _prepare(self.path)

    def write(self, number: int, row: Row, kept: bool, rounds: Sequence[Mapping[str, Any]]) -> None:
        """Write the trace of a row. ``rounds``: the scores of its rounds; ``number``: its place in the call."""
        if self._trace_callback is not None and not judged(self._trace_callback, row, "trace_callback"):
            return
        success = kept
        if self._success_callback is not None:
            success = judged(self._success_callback, row, "success_callback")
        store_trace(self.path, None, number, {**trace_fields(row, success), "rounds": list(rounds)})


def _prepare(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise InvalidInputError("trace_dir", str(path), "a folder; this is a file")
    names = [entry.name for entry in path.iterdir()] if path.exists() else []
    others = sorted(name for name in names if not is_trace_name(name))
    if others:
        raise InvalidInputError(
            "trace_dir", str(path), f"a new folder, or one with traces only; this one has {', '.join(others[:3])}"
        )
    if names:
        move_aside(path)
    path.mkdir(parents=True, exist_ok=True)
