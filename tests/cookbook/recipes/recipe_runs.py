"""Recipes of tinker-cookbook as processes, and what they leave behind.

``bench.start("sl_loop", max_steps=4)`` runs ``python -m tinker_cookbook.recipes.sl_loop`` with these options in a
directory where the hub's names are local. A run that continues another one has its ``log_path``.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE_MODEL = "Qwen/Qwen3.5-9B-Base"  # what the recipes train unless told otherwise; plain text, "User: …"
INSTRUCT_MODEL = "Qwen/Qwen3-4B-Instruct-2507"  # rendered as ChatML, the demo model's own format

# Levels as the cookbook's log has them, warnings of Python, uncaught exceptions.
_COMPLAINT = re.compile(r"\[(WARNING|ERROR|CRITICAL)\]|\w+Warning: |^Traceback|\w+Error: ")
# What the cookbook says about its own use of the SDK.
_EXPECTED = re.compile(r"FutureWarning: DEPRECATED: ServiceClient\.create_rest_client\(\)")
_COLOR = re.compile(r"\x1b\[\d+m")
_RUN_SECONDS = 400


@dataclass(frozen=True)
class Bench:
    """A running server and all that a recipe needs to find it."""

    url: str
    python: Path
    hub: Path
    runs: Path
    environment: dict[str, str]

    def start(self, recipe: str, log_path: str, **options: object) -> "Run":
        folder = self.runs / log_path
        output = self.runs / f"{log_path}-{time.monotonic_ns()}.log"
        self.runs.mkdir(exist_ok=True)
        given = {"base_url": self.url, "log_path": folder, **options}
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
    rows_before: int  # metrics of the runs that this one continues

    def finish(self) -> "Run":
        """Wait for a good end."""
        try:
            code = self.process.wait(_RUN_SECONDS)
        finally:
            self.process.kill()
        assert code == 0, self.said
        return self

    def kill_when(self, happened: Callable[["Run"], bool]) -> "Run":
        """SIGKILL: no chance to save or to say goodbye."""
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
        """Warnings and errors of the SDK, the cookbook and Python."""
        return [line for line in self.said.splitlines() if _COMPLAINT.search(line) and not _EXPECTED.search(line)]

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        return _rows(self.folder / "checkpoints.jsonl")

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One row a step."""
        return _rows(self.folder / "metrics.jsonl")[self.rows_before :]

    def metric(self, name: str) -> dict[int, float]:
        """By step, where it was measured."""
        return {int(row["step"]): row[name] for row in self.metrics if name in row}


def _rows(file: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSONL file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
