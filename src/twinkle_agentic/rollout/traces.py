"""The traces of rollouts: a readable file for each finished conversation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle_agentic.data_format.trace import TraceTest, judged, store_trace, trace_fields

__all__ = ["TraceWriter"]


class TraceWriter:
    """Writes finished trajectories into a folder, one pretty-printed JSON file for each.

    :func:`~twinkle_agentic.data_format.trace.store_trace` says how files are called; ``success_callback`` decides
    between ok and fail. ``trace_callback`` chooses the trajectories to store. A callback that raises is logged, and
    means "do not store" or "fail".
    """

    def __init__(
        self, trace_dir: str | Path | None, trace_callback: TraceTest | None, success_callback: TraceTest | None
    ) -> None:
        self._folder = None if trace_dir is None else Path(trace_dir)
        self._trace_callback = trace_callback
        self._success_callback = success_callback

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
        for index, trajectory in enumerate(trajectories):
            if self._trace_callback is not None and not judged(self._trace_callback, trajectory, "trace_callback"):
                continue
            success = None
            if self._success_callback is not None:
                success = judged(self._success_callback, trajectory, "success_callback")
            trace = {**trace_fields(trajectory, success), **(extras[index] if extras else {})}
            store_trace(self._folder, global_step, index, trace)
