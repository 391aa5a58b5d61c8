"""The check whether the WAL of a SQLite database still holds all committed transactions.

SQLite reads a WAL up to the first frame whose checksum is wrong and silently ignores the rest. So one flipped bit, or a
truncated file, loses committed transactions. What was committed can be found out: SQLite's index of the WAL, the file
``-shm``, contains the number of the last frame of the last commit. It is in the page cache, so it survives the death of
the process that wrote it. After a crash SQLite does not read this index but rebuilds it. Therefore the WAL and its
index are compared here, before SQLite opens them.

Neither file is synced with every commit. So after the machine itself went down, frames may be missing (this is
documented). A server refuses to start because of a difference only within one boot.
"""

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_WAL_HEADER = 32
_FRAME_HEADER = 24
_INDEX_HEADER = struct.Struct("=IIIBBHII8s8sII")  # struct WalIndexHdr of SQLite, twice at the beginning of the file
_BACKFILL = 2 * _INDEX_HEADER.size  # offset of struct WalCkptInfo, whose first field is nBackfill
_MAGIC = 0x377F0682
_FRAMES_AT_ONCE = 1024


@dataclass(frozen=True)
class WalDamage:
    """A WAL of which only ``found`` of ``committed`` frames can be read.

    If SQLite's index of the WAL is missing or damaged, ``committed`` counts the frames that have the salts of this WAL.
    ``is_needed``: some of the other frames are not in the database file either. ``is_consistent``: the first ``found``
    frames together with the database file give the database as it was after an earlier commit.
    """

    file: Path
    found: int
    committed: int
    is_needed: bool
    is_consistent: bool
    good_bytes: int  # size of the readable part of the file

    def __str__(self) -> str:
        return f"is damaged: of {self.committed} committed frames, {self.found} can be read"


@dataclass(frozen=True)
class _Index:
    """The fields of the WAL index that matter here."""

    frames: int  # number of the last frame of the last commit
    salts: bytes
    backfilled: int  # number of frames that were copied to the database file and synced


def check_wal(database: Path) -> WalDamage | None:
    """Return the damage of the WAL of a database that no process has open; None if no damage can be seen."""
    wal = database.with_name(f"{database.name}-wal")
    index = _read_index(database.with_name(f"{database.name}-shm"))
    found, with_salts, good_bytes = _read_wal(wal, None if index is None else index.salts)
    if index is None:
        # Without an index, damage shows as frames of this WAL after a damaged one. A single damaged frame at the end is
        # normal: an interrupted commit leaves it.
        return WalDamage(wal, found, with_salts, True, False, good_bytes) if with_salts > found + 1 else None
    if found >= index.frames:
        return None
    is_needed, is_consistent = index.backfilled < index.frames, 0 < found >= index.backfilled
    return WalDamage(wal, found, index.frames, is_needed, is_consistent, good_bytes)


def set_aside(database: Path) -> Path:
    """Rename a damaged WAL, if it exists, and return its new path. SQLite would read only some of its frames."""
    wal = database.with_name(f"{database.name}-wal")
    aside = database.with_name(f"{database.name}-wal.damaged-{int(time.time())}")
    if wal.exists():
        os.replace(wal, aside)
    return aside


def _read_index(file: Path) -> _Index | None:
    """Return the content of the index; None if it is missing or damaged."""
    try:
        content = file.read_bytes()[: _BACKFILL + 4]
    except OSError:
        return None
    if len(content) < _BACKFILL + 4:
        return None
    for start in (0, _INDEX_HEADER.size):
        raw = content[start : start + _INDEX_HEADER.size]
        fields = _INDEX_HEADER.unpack(raw)
        words = np.frombuffer(raw[:40], "=u4")
        if fields[3] == 1 and _plain_sum(words, 0, 0) == fields[-2:]:
            return _Index(frames=fields[6], salts=fields[9], backfilled=struct.unpack_from("=I", content, _BACKFILL)[0])
    return None


def _read_wal(file: Path, salts: bytes | None) -> tuple[int, int, int]:
    """Return three numbers about a WAL:

    - the number of the last frame of the last commit that can be read completely,
    - the number of the last frame that has the salts of this WAL, readable or not,
    - the size in bytes of the file up to the end of the first-named frame.

    All are 0 if the file or its header cannot be read, or if it does not have the given ``salts``.
    """
    try:
        with file.open("rb") as log:
            header = log.read(_WAL_HEADER)
            if len(header) < _WAL_HEADER:
                return 0, 0, 0
            magic, _, page_size = struct.unpack(">III", header[:12])
            words = np.frombuffer(header[:24], ">u4" if magic & 1 else "<u4")
            sums = _plain_sum(words, 0, 0)
            is_whole = (
                magic | 1 == _MAGIC | 1
                and sums == struct.unpack(">II", header[24:32])
                and salts in (None, header[16:24])
            )
            if not is_whole:
                return 0, 0, 0
            found, with_salts = _read_frames(log.read(), page_size, words.dtype, header[16:24], sums)
            return found, with_salts, _WAL_HEADER + found * (_FRAME_HEADER + page_size)
    except OSError:
        return 0, 0, 0


def _read_frames(
    content: bytes, page_size: int, order: "np.dtype[np.uint32]", salts: bytes, sums: tuple[int, int]
) -> tuple[int, int]:
    """Return the first two numbers of :func:`_read_wal`."""
    size = _FRAME_HEADER + page_size
    count = len(content) // size
    frames = np.frombuffer(content[: count * size], np.uint8).reshape(count, size)
    checksum = _FrameSum(2 + page_size // 4)
    committed, with_salts, is_whole = 0, 0, True
    for start in range(0, count, _FRAMES_AT_ONCE):
        part = frames[start : start + _FRAMES_AT_ONCE]
        words = np.concatenate([part[:, :8], part[:, _FRAME_HEADER:]], axis=1).view(order).astype(np.uint64)
        own = checksum.contributions(words)
        for number, frame in enumerate(part):
            head = frame[:_FRAME_HEADER].tobytes()
            if head[8:16] == salts:
                with_salts = start + number + 1
            if not is_whole:
                continue
            sums = checksum.after(sums, own[number])
            is_whole = head[8:16] == salts and struct.unpack(">II", head[16:24]) == sums
            if is_whole and head[4:8] != bytes(4):  # the size of the database, not 0 in the last frame of a commit
                committed = start + number + 1
    return committed, with_salts


class _FrameSum:
    """SQLite's checksum of frames, computed for many frames at once.

    The checksum is a linear recurrence: for every two words x, y, (a, b) becomes (a + x + b, b + y + (a + x + b)). So
    what a frame adds to the sums does not depend on the frames before it.
    """

    def __init__(self, words: int) -> None:
        step = np.array([[1, 1], [1, 2]], np.uint64)
        power = np.eye(2, dtype=np.uint64)
        entering = np.array([[1, 0], [1, 1]], np.uint64)  # what x and y add to a and b in their own step
        weights = np.empty((words // 2, 2, 2), np.uint64)
        for place in reversed(range(words // 2)):
            weights[place] = power @ entering & np.uint64(0xFFFFFFFF)
            power = power @ step & np.uint64(0xFFFFFFFF)
        self._power = power
        self._weights = weights.transpose(1, 0, 2).reshape(2, words)

    def contributions(self, frames: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return for each frame (a row of words) what it adds to the two sums."""
        return (frames @ self._weights.T) & np.uint64(0xFFFFFFFF)

    def after(self, sums: tuple[int, int], own: npt.NDArray[np.uint64]) -> tuple[int, int]:
        """Return the sums after a frame, from the sums before it and its own contribution."""
        total = (self._power @ np.array(sums, np.uint64) + own) & np.uint64(0xFFFFFFFF)
        return int(total[0]), int(total[1])


def _plain_sum(words: npt.NDArray[np.uint32], first: int, second: int) -> tuple[int, int]:
    """Return SQLite's checksum of a few words, computed step by step."""
    for x, y in zip(words[::2].tolist(), words[1::2].tolist(), strict=True):
        first = (first + x + second) & 0xFFFFFFFF
        second = (second + y + first) & 0xFFFFFFFF
    return first, second
