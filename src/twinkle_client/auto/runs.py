"""The folders of runs, and the processes of their scripts."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_client.auto.runtime import check_run_id, read_lines, read_meta, write_meta
from twinkle_client.environment import script_variables
from twinkle_client.errors import invalid, unknown

__all__ = ["Run", "Runs"]

_LOG_TAIL_BYTES = 8192
_STOP_SECONDS = 60.0  # a script that stops saves a checkpoint first


@dataclass(frozen=True)
class Run:
    """One run: its folder and what its files say."""

    directory: Path

    @property
    def run_id(self) -> str:
        return self.directory.name

    @property
    def script(self) -> Path:
        return self.directory / "train.py"

    def meta(self) -> dict[str, Any]:
        return read_meta(self.directory)

    def metrics(self, count: int = 5) -> list[dict[str, Any]]:
        return read_lines(self.directory / "metrics.jsonl")[-count:]

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the script's output."""
        try:
            with (self.directory / "output.log").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


class Runs:
    """The runs below a folder. Scripts of one ``Runs`` are children of this process; it reaps them.

    A process is signalled only if it is known to be a run's script: it is a child of this process, or its command line
    names the script. The number in ``meta.json`` alone may belong to another process by now.
    """

    def __init__(self, base_dir: str | Path = "~/.cache/twinkle") -> None:
        self.base_dir = Path(base_dir).expanduser()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def all(self) -> list[Run]:
        """Return the runs, the newest first."""
        folders = [path.parent for path in self.base_dir.glob("*/meta.json")]
        return [Run(folder) for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)]

    def get(self, run_id: str) -> Run:
        """Return a run by its id or by a beginning of it that only one run has."""
        check_run_id(run_id)
        runs = self.all()
        found = [run for run in runs if run.run_id == run_id] or [r for r in runs if r.run_id.startswith(run_id)]
        if len(found) != 1:
            raise unknown("run", run_id, [run.run_id for run in found or runs])
        return found[0]

    def create(self, name: str, script: str) -> Run:
        """Make the folder of a new run with its script. The script is not started."""
        run = Run(self.base_dir / f"{check_run_id(name)}_{time.strftime('%Y%m%d-%H%M%S')}")
        run.directory.mkdir(parents=True)
        run.script.write_text(script, encoding="utf-8")
        write_meta(run.directory, run_id=run.run_id, status="created")
        return run

    def replace_script(self, run: Run, script: str) -> Path:
        """Give a run another script. The present one is kept as ``train_vN.py``, whose path is returned."""
        number = 1
        while (kept := run.directory / f"train_v{number}.py").exists():
            number += 1
        run.script.rename(kept)
        run.script.write_text(script, encoding="utf-8")
        return kept

    def launch(self, run: Run, server_url: str) -> int:
        """Start a run's script with this Python, in its folder, and return the number of its process.

        server_url: the Twinkle server that the script's client uses if the script names none.
        """
        if self.is_running(run):
            raise invalid("run", run.run_id, "a run whose script is not running")
        with (run.directory / "output.log").open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, str(run.script)],
                cwd=run.directory,
                env=script_variables(run.run_id, server_url),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends the agent, not the training
            )
        self._children[run.run_id] = child
        write_meta(run.directory, status="running", pid=child.pid)
        return child.pid

    def is_running(self, run: Run) -> bool:
        return self._process(run) is not None

    def state(self, run: Run) -> str:
        """Return the run's status. A script that says it is running and is not has ended without a word."""
        status = str(run.meta().get("status", "unknown"))
        return "ended" if status == "running" and not self.is_running(run) else status

    def pause(self, run: Run) -> None:
        """Kill the script at once. What it did not save is lost; ``launch`` starts it again."""
        self._signal(run, signal.SIGKILL)
        write_meta(run.directory, status="paused")

    def stop(self, run: Run) -> bool:
        """Ask the script to end, which may save a checkpoint, and return whether it did within a minute."""
        self._signal(run, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while self.is_running(run):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        write_meta(run.directory, status="stopped")
        return True

    def _signal(self, run: Run, number: signal.Signals) -> None:
        process = self._process(run)
        if process is None:
            raise invalid("run", run.run_id, "a run whose script is running")
        os.kill(process, number)
        child = self._children.get(run.run_id)
        if number is signal.SIGKILL and child is not None:
            child.wait()

    def _process(self, run: Run) -> int | None:
        """Return the number of the run's process if it is running."""
        child = self._children.get(run.run_id)
        if child is not None:
            return child.pid if child.poll() is None else None
        process = run.meta().get("pid")
        if not isinstance(process, int) or process <= 1:
            return None
        try:  # of another agent: Linux tells its command line; elsewhere nothing is known of it
            command = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            return None
        return process if str(run.script).encode() in command.split(b"\0") else None
