"""Whether the WAL of a SQLite database still holds all that was committed.

SQLite reads a WAL up to the first frame whose checksum is wrong and ignores the rest without a word: one flipped bit,
or a file that was cut, loses committed transactions. What was committed can be known: SQLite's index of the WAL, the
file ``-shm``, names the last frame of the last commit. It is in the page cache and so survives the death of the process
that wrote it. SQLite itself does not read it after a crash, but builds it anew. So we compare both before SQLite opens
them.

Neither file is synced with every commit. After the machine itself went down, frames may be missing, which the
documentation says: the caller compares only within one boot.
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
_BACKFILL = 2 * _INDEX_HEADER.size  # where struct WalCkptInfo begins, with nBackfill
_MAGIC = 0x377F0682
_FRAMES_AT_ONCE = 1024


@dataclass(frozen=True)
class WalDamage:
    """``found`` of ``committed`` frames can be read. ``is_needed``: some of the others are nowhere else.

    ``is_consistent``: the database as it was after the frames that were found can still be had.
    """

    file: Path
    found: int
    committed: int
    is_needed: bool
    is_consistent: bool
    good_bytes: int  # of the file: what can be read

    def __str__(self) -> str:
        return f"is damaged: of {self.committed} committed frames, {self.found} can be read"


@dataclass(frozen=True)
class _Index:
    frames: int  # of the last commit
    salts: bytes
    backfilled: int  # frames that are in the database file, synced


def check_wal(database: Path) -> WalDamage | None:
    """Return what is wrong with the WAL of a database that nobody has open; None if all is there, or nobody can say."""
    wal = database.with_name(f"{database.name}-wal")
    index = _read_index(database.with_name(f"{database.name}-shm"))
    found, with_salts, good_bytes = _read_wal(wal, None if index is None else index.salts)
    if index is None:
        # Frames of this log behind one that is damaged; a torn one at the end is what an interrupted commit leaves.
        return WalDamage(wal, found, with_salts, True, False, good_bytes) if with_salts > found + 1 else None
    if found >= index.frames:
        return None
    is_needed, is_consistent = index.backfilled < index.frames, 0 < found >= index.backfilled
    return WalDamage(wal, found, index.frames, is_needed, is_consistent, good_bytes)


def set_aside(database: Path) -> Path:
    """Move a WAL that is damaged and not needed out of SQLite's way: it would read some of its frames, not others."""
    wal = database.with_name(f"{database.name}-wal")
    aside = database.with_name(f"{database.name}-wal.damaged-{int(time.time())}")
    if wal.exists():
        os.replace(wal, aside)
    return aside


def _read_index(file: Path) -> _Index | None:
    """Return what the index says; None where there is none, or none that is whole."""
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
    """Return the number of the last whole commit's last frame, that of the last frame with the log's salts, and how
    many bytes the former takes with all before it."""
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
    size = _FRAME_HEADER + page_size
    count = len(content) // size
    frames = np.frombuffer(content[: count * size], np.uint8).reshape(count, size)
    checksum = _FrameSum(2 + page_size // 4)
    committed, with_salts, is_whole = 0, 0, True
    for start in range(0, count, _FRAMES_AT_ONCE):
        part = frames[start : start + _FRAMES_AT_ONCE]
        words = np.concatenate([part[:, :8], part[:, _FRAME_HEADER:]], axis=1).view(order).astype(np.uint64)
        own = checksum.of(words)
        for number, frame in enumerate(part):
            head = frame[:_FRAME_HEADER].tobytes()
            if head[8:16] == salts:
                with_salts = start + number + 1
            if not is_whole:
                continue
            sums = checksum.after(sums, own[number])
            is_whole = head[8:16] == salts and struct.unpack(">II", head[16:24]) == sums
            if is_whole and head[4:8] != bytes(4):  # the size of the database, in the last frame of a commit
                committed = start + number + 1
    return committed, with_salts


class _FrameSum:
    """SQLite's checksum, a linear recurrence: (a, b) becomes (a + x + b, b + y + (a + x + b)) with each two words x, y.

    So what a frame adds does not depend on the frames before it, and all frames are summed at once.
    """

    def __init__(self, words: int) -> None:
        step = np.array([[1, 1], [1, 2]], np.uint64)
        power = np.eye(2, dtype=np.uint64)
        entering = np.array([[1, 0], [1, 1]], np.uint64)  # what x and y add to a and b at once
        weights = np.empty((words // 2, 2, 2), np.uint64)
        for place in reversed(range(words // 2)):
            weights[place] = power @ entering & np.uint64(0xFFFFFFFF)
            power = power @ step & np.uint64(0xFFFFFFFF)
        self._power = power
        self._weights = weights.transpose(1, 0, 2).reshape(2, words)

    def of(self, frames: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return what each frame adds, of rows of words."""
        return (frames @ self._weights.T) & np.uint64(0xFFFFFFFF)

    def after(self, sums: tuple[int, int], own: npt.NDArray[np.uint64]) -> tuple[int, int]:
        """Return the sums behind a frame, of those before it and of what it adds itself."""
        total = (self._power @ np.array(sums, np.uint64) + own) & np.uint64(0xFFFFFFFF)
        return int(total[0]), int(total[1])


def _plain_sum(words: npt.NDArray[np.uint32], first: int, second: int) -> tuple[int, int]:
    for x, y in zip(words[::2].tolist(), words[1::2].tolist(), strict=True):
        first = (first + x + second) & 0xFFFFFFFF
        second = (second + y + first) & 0xFFFFFFFF
    return first, second
