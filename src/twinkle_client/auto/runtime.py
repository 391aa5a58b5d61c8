"""What a training script records about itself: its state, its metrics and its log, in the folder of its run.

A run lives in ``<base_dir>/<run id>``: ``train.py`` and its earlier versions ``train_vN.py``, ``meta.json``,
``metrics.jsonl`` and ``output.log``. ``twinkle-auto`` starts scripts there and reads the files; a script that is
started by hand gets a folder of its own.
"""

import atexit
import json
import math
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from twinkle_client.environment import run_id_of_launch
from twinkle_client.errors import invalid

__all__ = ["TrainingRuntime", "check_run_id", "read_lines", "read_meta", "write_meta"]

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class TrainingRuntime:
    """The record of one run.

    run_id: the run's name; None means TWINKLE_RUN_ID, which ``twinkle-auto`` sets, else ``run``. If
    ``<base_dir>/<run_id>`` exists, the record goes on there; otherwise it begins in ``<run_id>_<time>``.
    """

    def __init__(self, run_id: str | None = None, base_dir: str | Path = "~/.cache/twinkle") -> None:
        base = Path(base_dir).expanduser()
        name = check_run_id(run_id or run_id_of_launch() or "run")
        if not (base / name).is_dir():
            name = f"{name}_{time.strftime('%Y%m%d-%H%M%S')}"
        self.run_id = name
        self.directory = base / name
        self.directory.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        model_id: str = "",
        config: Mapping[str, Any] | None = None,
        script_path: str | Path | None = None,
    ) -> None:
        """Record that training begins. A script of another folder is copied to the run as ``train.py``."""
        script = self.directory / "train.py"
        if script_path is not None and Path(script_path).is_file() and Path(script_path).resolve() != script.resolve():
            shutil.copyfile(script_path, script)
        write_meta(self.directory, run_id=self.run_id, model_id=model_id, config=dict(config or {}), status="running")

    def log_metrics(self, **metrics: float) -> None:
        """Append a line with the time (``ts``, seconds since 1970) and these numbers to ``metrics.jsonl``."""
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise invalid(name, value, "a number")
        # JSON has no NaN
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._append("metrics.jsonl", json.dumps({"ts": time.time(), **numbers}))

    def log(self, msg: str) -> None:
        """Append a line to ``output.log``."""
        self._append("output.log", f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {msg}")

    def get_resume_info(self) -> dict[str, int]:
        """Return ``{"last_step": n}``: the last ``step`` in the metrics, else the number of their lines."""
        lines = read_lines(self.directory / "metrics.jsonl")
        steps = [line["step"] for line in lines if isinstance(line.get("step"), int | float)]
        return {"last_step": int(steps[-1]) if steps else len(lines)}

    def finish(self, status: str = "completed") -> None:
        """Record how training ended."""
        write_meta(self.directory, status=status)

    def register_graceful_shutdown(self, model: Any, dataloader: Any = None, checkpoint_name: str = "stopped") -> None:
        """On SIGTERM, save a checkpoint with the optimizer's state and the position in the data, and exit with 143.

        Call it in the main thread. The signal may come in the middle of a request, so the handler only ends the
        script; the checkpoint is saved when the script has been unwound.
        """

        def save() -> None:
            consumed = 0 if dataloader is None else int(dataloader.get_state()["consumed_train_samples"])
            saved = model.save(checkpoint_name, save_optimizer=True, consumed_train_samples=consumed)
            self.log(f"stopped by SIGTERM; checkpoint {saved}")
            self.finish("stopped")

        def stop(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the checkpoint
            atexit.register(save)
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, stop)

    def _append(self, name: str, line: str) -> None:
        with (self.directory / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def check_run_id(run_id: str) -> str:
    """Return a run's name. Raise InvalidRequestError for one that is no plain name of a folder."""
    if not _RUN_ID.fullmatch(run_id):
        raise invalid("run_id", run_id, "letters, digits, '.', '_' and '-', at most 128, a letter or digit first")
    return run_id


def read_meta(directory: Path) -> dict[str, Any]:
    """Return a run's ``meta.json``; {} if it has none."""
    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def write_meta(directory: Path, **fields: Any) -> None:
    """Change fields of a run's ``meta.json``. The file is replaced as a whole, so a reader never sees half of it."""
    meta = {**read_meta(directory), **fields, "updated": time.time()}
    new = directory / "meta.json.new"
    new.write_text(json.dumps(meta, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    new.replace(directory / "meta.json")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines. The last line may be half-written; such lines are left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
