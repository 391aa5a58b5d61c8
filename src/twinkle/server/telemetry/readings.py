"""Numbers that are read when somebody asks for metrics: of the services, and of the machine."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from twinkle.model.types import TrainerNumbers
from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.metrics import Reading


@dataclass(frozen=True)
class TrainingReadings:
    """The numbers of one training service. ``waiting``: ops by tenant. ``trainer`` is None until its first batch."""

    waiting: Mapping[str, int]
    merge_ratio: float
    adapters_on_disk: int
    busy_seconds: float
    step_seconds: float
    long_polls: int
    unfetched_bytes: int
    trainer: TrainerNumbers | None


@dataclass(frozen=True)
class SamplingReadings:
    """The numbers of one sampler service."""

    waiting: int
    busy_seconds: float
    long_polls: int
    unfetched_bytes: int


_JOURNALS = ("bodies", "outcomes")
_MEMORY = {"MemAvailable": "available", "MemTotal": "total"}


def machine_readings(data_dir: Path) -> list[Reading]:
    """Return what the machine has left of memory and disk. Blocks for a moment: not for the event loop."""
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
        with suppress(FileNotFoundError):  # it was just deleted
            total += file.stat().st_size
    return total
