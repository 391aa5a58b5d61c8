"""Steps one after another over the rows of a dataset, with a log of the rows that they drop."""

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from filelock import FileLock

from twinkle.data_format.columns import Columns, columns_to_rows, rows_to_columns
from twinkle.errors import InvalidInputError
from twinkle.preprocessor import Preprocessor
from twinkle.utils.logger import get_logger
from twinkle_agentic.preprocessor.utils import Result, Row, Rows, move_aside

__all__ = ["QualityPreprocessor"]

Step = Callable[[Rows], Result]


class QualityPreprocessor(Preprocessor):
    """Runs steps for ``Dataset.map``: each gets the rows that the step before it has kept.

    pipeline: the steps, which are called with rows and return (kept, dropped).
    dropped_log_path: dropped rows are appended to this file as JSON lines ``{"step": …, "row": …}``. Processes of one
    ``map`` may share it. A file of that name from an earlier run is renamed to ``<name>.1``, ``.2`` …; it is never
    deleted.
    """

    def __init__(self, pipeline: Sequence[Step], dropped_log_path: str | PathLike[str] = "") -> None:
        if isinstance(pipeline, str | Mapping) or not isinstance(pipeline, Sequence):
            raise InvalidInputError("pipeline", pipeline, "a list of steps")
        for step in pipeline:
            if isinstance(step, type) or not callable(step):
                raise InvalidInputError("pipeline", step, "instances of steps, such as HardFilter()")
        self.pipeline = list(pipeline)
        self.dropped_log_path = str(dropped_log_path)
        if self.dropped_log_path:
            self._prepare_log(Path(self.dropped_log_path))

    def __call__(self, columns: Rows) -> Columns:
        """Return the columns of the rows that all steps kept. ``columns`` may also be a list of rows."""
        rows = columns_to_rows(columns)
        names = list(columns) if isinstance(columns, Mapping) else list(rows_to_columns(rows))
        for step in self.pipeline:
            rows = self._run(step, rows)
        names += [name for name in rows_to_columns(rows) if name not in names]
        return rows_to_columns(rows, names)

    def _run(self, step: Step, rows: list[Row]) -> list[Row]:
        name = _name_of(step)
        result = step(rows)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidInputError(
                "pipeline", f"a {type(result).__name__} from {name}", "steps that return (kept, dropped)"
            )
        kept, dropped = result
        get_logger().info(f"{name}: {len(rows)} rows, kept {len(kept)}, dropped {len(dropped)}")
        if dropped and self.dropped_log_path:
            self._log(name, dropped)
        return kept

    def _log(self, name: str, dropped: Sequence[Row]) -> None:
        lines = [json.dumps({"step": name, "row": row}, ensure_ascii=False, default=_plain) for row in dropped]
        path = Path(self.dropped_log_path)
        with FileLock(f"{path}.lock"), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            # a lone surrogate, which UTF-8 cannot hold, becomes JSON's own escape
            file.write("".join(f"{line}\n" for line in lines))

    @staticmethod
    def _prepare_log(path: Path) -> None:
        if path.is_dir():
            raise InvalidInputError("dropped_log_path", str(path), "a file; this is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            move_aside(path)


def _name_of(step: Step) -> str:
    """Return the class of a step, or the name of a function."""
    return str(getattr(step, "__name__", type(step).__name__))


def _plain(value: Any) -> Any:
    """Return a value that JSON does not know as lists (arrays) or as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
