"""Checksums of the files in a directory that never changes after it was written: snapshots, checkpoints, versions.

They are stored in the directory, in ``checksums.json``, which also has a checksum of itself. A directory without that
file was written by an earlier version of Twinkle and cannot be checked.
"""

import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path

from twinkle.errors import CheckpointError

CHECKSUMS = "checksums.json"
_PIECE = 2**22  # bytes

_logger = logging.getLogger(__name__)


def write_checksums(directory: Path) -> None:
    """Write ``checksums.json`` with size and checksum of every other file in the directory and its subdirectories."""
    (directory / CHECKSUMS).write_text(_sealed(sums_of(directory, CHECKSUMS)))


def sums_of(directory: Path, without: str) -> dict[str, tuple[int, int]]:
    """Return (size, checksum) by relative path of all files in the directory and below, except the file ``without``."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / without)
    return {path.relative_to(directory).as_posix(): (path.stat().st_size, _checksum(path)) for path in files}


def read_checksums(directory: Path) -> Mapping[str, tuple[int, int]] | None:
    """Return the stored (size, checksum) by name; None if there is no ``checksums.json``. Damaged: CheckpointError."""
    try:
        text = (directory / CHECKSUMS).read_bytes().decode()
        sums = json.loads(text)["files"]
        if _sealed(sums) != text:
            raise ValueError("its own checksum is wrong")
        return {name: (int(size), int(checksum)) for name, (size, checksum) in sums.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / CHECKSUMS} is damaged: {error}") from error


def damaged_files(directory: Path) -> list[str]:
    """Return the names of the files that are missing or have changed since they were written. Reads the files.

    There are none if the directory has no ``checksums.json``; CheckpointError if that is damaged.
    """
    sums = read_checksums(directory)
    return [] if sums is None else [name for name, sum_ in sums.items() if not _is_whole(directory / name, *sum_)]


def check_files(directory: Path) -> None:
    """Log and raise CheckpointError if a file is missing or has changed since it was written. Reads the files.

    A directory without ``checksums.json`` is not checked.
    """
    try:
        damaged = damaged_files(directory)
        if damaged:
            raise CheckpointError(f"{directory} is damaged: {', '.join(damaged)} missing or changed")
    except CheckpointError as error:
        _logger.error("damaged: %s", error)
        raise


def _checksum(file: Path) -> int:
    """Return the checksum of a file.

    In large pieces, because a thread waits for its turn after each of them, and in one buffer, because the threads of
    a process wait for each other when they ask the operating system for memory.
    """
    checksum, buffer = 0, bytearray(min(_PIECE, file.stat().st_size))
    with memoryview(buffer) as view, file.open("rb", buffering=0) as content:
        while size := content.readinto(view):
            checksum = zlib.crc32(view[:size], checksum)
    return checksum


def _is_whole(file: Path, size: int, checksum: int) -> bool:
    try:
        return file.stat().st_size == size and _checksum(file) == checksum
    except OSError:
        return False


def _sealed(sums: Mapping[str, object]) -> str:
    return json.dumps({"files": sums, "checksum": zlib.crc32(json.dumps(sums).encode())}, indent=1)
