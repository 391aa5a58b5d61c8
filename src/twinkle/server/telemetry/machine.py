"""What the machine has left: memory and disk. Blocks for a moment: not for the event loop."""

import shutil
from pathlib import Path

from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.metrics import Reading

__all__ = ["machine_readings"]

_JOURNALS = ("bodies", "outcomes")
_MEMORY = {"MemAvailable": "available", "MemTotal": "total"}


def machine_readings(data_dir: Path) -> list[Reading]:
    return [
        *_memory(),
        Reading(instruments.DISK_FREE, shutil.disk_usage(data_dir).free),
        *(Reading(instruments.JOURNAL_BYTES, _size(data_dir / "journal" / kind), (kind,)) for kind in _JOURNALS),
    ]


def _memory() -> list[Reading]:
    fields = (line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return [
        Reading(instruments.HOST_MEMORY, int(value.split()[0]) * 1024, (_MEMORY[name],))
        for name, value in fields
        if name in _MEMORY
    ]


def _size(directory: Path) -> int:
    total = 0
    for file in directory.glob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # it was just deleted
            continue
    return total
