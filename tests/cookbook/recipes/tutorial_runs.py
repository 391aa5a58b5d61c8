"""Run tutorials of tinker-cookbook against a server, with some of their numbers changed.

The tutorials are marimo notebooks in the cookbook's source distribution. They run as plain Python: every cell once, in
the order of their variables.
"""

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cookbook.recipes.recipe_runs import Bench
from tests.support.paths import ROOT

ENVIRONMENT = ROOT / ".venv-cookbook"
SOURCES = ENVIRONMENT / "source" / "tutorials"
OLDER_SDK = ENVIRONMENT / "tinker-0.35"

_RUNNER = Path(__file__).with_name("run_tutorials.py")
_RUN_SECONDS = 1500  # a guard; alone on two cores no tutorial should need a quarter of it
_NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?")


@dataclass(frozen=True)
class Change:
    """Other numbers in a tutorial: ``old`` occurs in it once, and ``new`` differs from it in numbers only."""

    tutorial: str
    old: str
    new: str
    reason: str

    def apply(self, source: str) -> str:
        assert source.count(self.old) == 1, f"{self.tutorial} contains {self.old!r} {source.count(self.old)} times"
        assert self.new != self.old, self
        assert _NUMBER.sub("0", self.new) == _NUMBER.sub("0", self.old), self
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class TutorialRun:
    """What a tutorial left behind."""

    definitions: dict[str, Any]  # the variables of its cells that are plain data
    printed: str
    folder: Path  # where it wrote its files

    def numbers(self, pattern: str) -> list[float]:
        """Return the numbers that the pattern's group matches in what the tutorial printed."""
        return [float(found) for found in re.findall(pattern, self.printed)]

    def metrics(self, *folder: str) -> list[dict[str, float]]:
        """Return what a training loop of the cookbook logged, one row for each step."""
        file = self.folder.joinpath("tutorials", *folder, "metrics.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]


class TutorialRunner:
    """A process that runs one tutorial after the other, each in a fork of itself."""

    def __init__(self, bench: Bench, python_path: Path | None = None) -> None:
        self._folder = bench.runs / "tutorials"
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = bench.environment | {"TINKER_BASE_URL": bench.url, "MPLBACKEND": "Agg"}
        environment["TINKER_COOKBOOK_RUNS_DIR"] = str(self._folder)
        if python_path is not None:
            environment["PYTHONPATH"] = str(python_path)
        self._process = subprocess.Popen(
            [bench.python, _RUNNER],
            cwd=bench.hub,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def run(self, name: str, changes: Sequence[Change]) -> TutorialRun:
        """Run a tutorial with those of the changes that concern it. It must succeed."""
        source = (SOURCES / f"{name}.py").read_text()
        for change in changes:
            source = change.apply(source) if change.tutorial == name else source
        tutorial, output, results = (self._folder / f"{name}{suffix}" for suffix in (".py", ".log", ".json"))
        tutorial.write_text(source)
        request = {"tutorial": str(tutorial), "output": str(output), "results": str(results), "seconds": _RUN_SECONDS}
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        answer = self._answers.readline().strip()
        printed = output.read_text() if output.exists() else ""
        assert answer == "0", f"{name} ended with {answer or 'its runner'}\n{printed}"
        return TutorialRun(json.loads(results.read_text()), printed, self._folder)

    def close(self) -> None:
        self._requests.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._answers.close()
