"""Run recipes of tinker-cookbook as processes, and read what they write.

``bench.start("sl_loop", max_steps=4)`` runs ``python -m tinker_cookbook.recipes.sl_loop`` with these options in a
directory where the hub's names are local folders. A run that continues another one has the same ``log_path``.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Log levels in the cookbook's format, Python warnings, uncaught exceptions.
_COMPLAINT = re.compile(r"\[(WARNING|ERROR|CRITICAL)\]|\w+Warning: |^Traceback|\w+Error: ")
# A warning about the cookbook's use of the SDK.
_EXPECTED = re.compile(r"FutureWarning: DEPRECATED: ServiceClient\.create_rest_client\(\)")
_COLOR = re.compile(r"\x1b\[\d+m")
_RUN_SECONDS = 1500  # a guard; alone on two cores no recipe should need a quarter of it


@dataclass(frozen=True)
class Bench:
    """A running server, and everything that a recipe needs to use it."""

    url: str
    python: Path
    hub: Path
    runs: Path
    environment: dict[str, str]

    def start(self, recipe: str, log_path: str, *, log_option: str = "log_path", **options: object) -> "Run":
        """Start a recipe. ``log_option``: its name for the directory that it writes to."""
        folder = self.runs / log_path
        output = self.runs / f"{log_path}-{time.monotonic_ns()}.log"
        self.runs.mkdir(exist_ok=True)
        given = {"base_url": self.url, log_option: folder, **options}
        with output.open("wb") as log:
            process = subprocess.Popen(
                [self.python, "-m", f"tinker_cookbook.recipes.{recipe}", *(f"{k}={v}" for k, v in given.items())],
                cwd=self.hub,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return Run(folder, output, process, len(_rows(folder / "metrics.jsonl")))


@dataclass(frozen=True)
class Run:
    """One process of a recipe."""

    folder: Path
    output: Path
    process: subprocess.Popen[bytes]
    rows_before: int  # number of metric rows from runs that this one continues

    def finish(self) -> "Run":
        """Wait for the process, which must exit with code 0."""
        try:
            code = self.process.wait(_RUN_SECONDS)
        finally:
            self.process.kill()
        assert code == 0, self.said
        return self

    def kill_when(self, happened: Callable[["Run"], bool]) -> "Run":
        """Kill the process with SIGKILL when the condition is true, so that it cannot save or close anything."""
        deadline = time.monotonic() + _RUN_SECONDS
        try:
            while not happened(self):
                assert self.process.poll() is None, self.said
                assert time.monotonic() < deadline, self.said
                time.sleep(0.05)
        finally:
            self.process.kill()
            self.process.wait()
        return self

    @property
    def said(self) -> str:
        return _COLOR.sub("", self.output.read_text())

    @property
    def complaints(self) -> list[str]:
        """Return warnings and errors of the SDK, the cookbook and Python."""
        return [line for line in self.said.splitlines() if _COMPLAINT.search(line) and not _EXPECTED.search(line)]

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        return _rows(self.folder / "checkpoints.jsonl")

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics, one row for each step."""
        return _rows(self.folder / "metrics.jsonl")[self.rows_before :]

    def metric(self, name: str) -> dict[int, float]:
        """Return one metric as ``{step: value}``, for the steps that have it."""
        return {int(row["step"]): row[name] for row in self.metrics if name in row}


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSONL file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
