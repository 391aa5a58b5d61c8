"""Measure a server every second: memory, files, threads and processes, disk, and its internal counts."""

import contextlib
import csv
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PLACES = ("journal", "snapshots", "checkpoints", "samplers", "processors")
MIB = 2**20
Row = dict[str, float]


@dataclass(frozen=True)
class Disk:
    """Disk usage of a directory and everything below it."""

    files: int
    directories: int
    size: int


def disk_of(directory: Path) -> Disk:
    files = directories = size = 0
    for folder, below, names in os.walk(directory):
        directories += len(below)
        files += len(names)
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                size += os.lstat(os.path.join(folder, name)).st_size
    return Disk(files, directories, size)


def process_of(pid: int) -> Row | None:
    """Return the measurements of a process; None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        files = len(os.listdir(f"/proc/{pid}/fd"))
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    memory = pages * os.sysconf("SC_PAGE_SIZE") / MIB
    return {"rss_mib": memory, "open_files": files, "children": len(children)}


class Measurements(threading.Thread):
    """Adds one row a second for the process that is currently the server."""

    def __init__(self, data_dir: Path, probe: Path, pid: Callable[[], int | None]) -> None:
        super().__init__(name="measurements", daemon=True)
        self.rows: list[Row] = []
        self.phase = 0.0  # recorded in each row
        self._data_dir = data_dir
        self._probe = probe
        self._pid = pid
        self._over = threading.Event()
        self.began = time.monotonic()

    def end(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(1.0):
            row = self.now()
            if row is not None:
                self.rows.append(row)

    def now(self) -> Row | None:
        """Measure now. Return None if no server is running or it has not counted yet."""
        pid = self._pid()
        process = None if pid is None else process_of(pid)
        counts = self._counts()
        if process is None or counts is None or counts.pop("pid") != pid:
            return None
        disk = {place: disk_of(self._data_dir / place) for place in PLACES}
        row: Row = {"seconds": round(time.monotonic() - self.began, 1), "phase": self.phase, **process, **counts}
        row |= {f"{place}_mib": one.size / MIB for place, one in disk.items()}
        row |= {f"{place}_files": one.files for place, one in disk.items()}
        row |= {f"{place}_directories": one.directories for place, one in disk.items()}
        row["database_mib"] = _size(self._data_dir / "state.db") / MIB
        row["database_log_mib"] = _size(self._data_dir / "state.db-wal") / MIB
        row["disk_mib"] = row["database_mib"] + sum(one.size for one in disk.values()) / MIB
        return row

    def _counts(self) -> dict[str, int] | None:
        try:
            counts: dict[str, int] = json.loads(self._probe.read_text())
        except FileNotFoundError:
            return None
        return counts


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def slope(rows: list[Row], name: str) -> float:
    """Return the growth per minute, by least squares."""
    minutes = np.array([row["seconds"] for row in rows]) / 60
    return float(np.polyfit(minutes, [row[name] for row in rows], 1)[0])


def write_csv(rows: list[Row], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: round(value, 3) for name, value in row.items()} for row in rows)
