"""Metrics that are read when metrics are collected: numbers of the services and of the machine."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from twinkle.model.types import TrainerNumbers
from twinkle.sampler.types import SamplerNumbers
from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.metrics import Reading

_JOURNALS = ("bodies", "outcomes")
_MEMORY = {"MemAvailable": "available", "MemTotal": "total"}


def queue_readings(
    model: str, queue: str, waiting: int, long_polls: int, unfetched_bytes: int, busy_seconds: float
) -> Iterator[Reading]:
    """Yield the numbers of one service's queue, ``training`` or ``sampling``, and the seconds that it computed."""
    yield Reading(instruments.QUEUE_DEPTH, waiting, (model, queue))
    yield Reading(instruments.LONG_POLLS, long_polls, (model, queue))
    yield Reading(instruments.UNFETCHED, unfetched_bytes, (model, queue))
    yield Reading(instruments.COMPUTE_SECONDS, busy_seconds, (model, queue))


def trainer_readings(model: str, numbers: TrainerNumbers) -> Iterator[Reading]:
    yield Reading(instruments.ADAPTERS, numbers.resident_adapters, (model, "device"))
    yield Reading(instruments.ADAPTERS, numbers.paged_adapters, (model, "host"))
    rows = numbers.token_rows + numbers.padding_rows
    yield Reading(instruments.PADDING_SHARE, numbers.padding_rows / rows if rows else 0.0, (model,))
    if numbers.memory is not None:
        yield Reading(instruments.DEVICE_MEMORY, numbers.memory.allocated, (model, "allocated"))
        yield Reading(instruments.DEVICE_MEMORY, numbers.memory.reserved, (model, "reserved"))
        yield Reading(instruments.DEVICE_MEMORY, numbers.memory.total, (model, "total"))


def image_readings(model: str, computed: int, reused: int) -> Iterator[Reading]:
    yield Reading(instruments.IMAGES, computed, (model, "computed"))
    yield Reading(instruments.IMAGES, reused, (model, "reused"))


def sampler_readings(model: str, numbers: SamplerNumbers) -> Iterator[Reading]:
    yield Reading(instruments.DECODE_STEPS, numbers.decode_steps, (model,))
    yield Reading(instruments.DECODED_TOKENS, numbers.decoded_tokens, (model,))


def machine_readings(data_dir: Path) -> list[Reading]:
    """Return the machine's memory, free disk and journal size. It reads files, so do not call it on the event loop."""
    return [
        *_memory(),
        Reading(instruments.DISK_FREE, shutil.disk_usage(data_dir).free),
        *(Reading(instruments.JOURNAL_BYTES, _size(data_dir / "journal" / kind), (kind,)) for kind in _JOURNALS),
    ]


def _memory() -> list[Reading]:
    return [Reading(instruments.HOST_MEMORY, size, (kind,)) for kind, size in host_memory().items()]


def host_memory() -> dict[str, int]:
    """Return the bytes of the machine's memory: ``available`` and ``total``. It reads a file."""
    fields = (line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {_MEMORY[name]: int(value.split()[0]) * 1024 for name, value in fields if name in _MEMORY}


def process_memory() -> int:
    """Return the bytes of memory of this process (its resident set). It reads a file."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _size(directory: Path) -> int:
    total = 0
    for file in directory.glob("*"):
        with suppress(FileNotFoundError):  # it was just deleted
            total += file.stat().st_size
    return total
