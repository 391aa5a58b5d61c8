"""Append-only segment files for bytes that are too large for a database row: request bodies and encoded outcomes.

A blob is a 16-byte header (magic, CRC-32 seeded with the length, length) followed by its data. A
:class:`~twinkle.server.types.BlobRef` says where it is; its ``offset`` is that of the header. One thread appends, any
thread reads. When ``append`` returns, the blob is in the page cache: it survives the death of the process, not of the
machine.

A segment is closed for good when it is full, when a failed append cannot be taken back, or when the process ends. So an
append that was interrupted by SIGKILL is always at the end of a segment. No record points to it, and it is left there.
Blobs are read only through their ``BlobRef``, never one after the other, so a damaged header or damaged data affects
only the op that owns the blob.

The processes of one server may share a journal (:class:`JournalWriters`). Each process then has a writer number, which
is the upper part of the number of its segments, and holds a lock on the file of that number. If the lock is free, the
process has ended: what it committed is committed, and nothing will be appended to its segments any more.
"""

import contextlib
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from twinkle.server.state.errors import JournalError, StorageFullError, StoreClosedError
from twinkle.server.state.files.guards import DISK_FULL, try_lock
from twinkle.server.types import BlobRef

SEGMENT_BYTES = 64 * 1024 * 1024

_MAGIC = b"TWJ1"
_HEADER = struct.Struct("<4sIQ")  # magic, crc32, length of the data
_SUFFIX = ".journal"
_WRITER_SUFFIX = ".writer"
_ALONE = 0  # the writer number of a server with one process
_SEGMENTS_OF_WRITER = 2**32  # segment number = writer number * this + count
_MAX_PARTS = 1000  # buffers for one writev: IOV_MAX is 1024 on Linux


class JournalWriters:
    """The writer numbers of one data directory. This process holds number :attr:`own` until :meth:`close`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        self._fd, self.own = self._claim()

    def is_dead(self, writer: int) -> bool:
        """Return whether the process with this writer number has ended."""
        try:
            fd = os.open(self._path(writer), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            return try_lock(fd, shared=True)
        finally:
            os.close(fd)

    def forget_dead(self, with_segments: set[int]) -> None:
        """Remove the number files of dead writers, except those in ``with_segments``, whose segments still exist."""
        for path in self._directory.glob(f"*{_WRITER_SUFFIX}"):
            writer = int(path.stem)
            if writer not in with_segments and self.is_dead(writer):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)

    def _claim(self) -> tuple[int, int]:
        """Take a free writer number. Its file is locked before it gets its name, so nobody ever sees it unlocked."""
        unnamed = self._directory / f".{secrets.token_hex(8)}"
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try_lock(fd, shared=False)  # cannot fail: no other process knows the file yet
        highest = max((int(path.stem) for path in self._directory.glob(f"*{_WRITER_SUFFIX}")), default=_ALONE)
        try:
            while True:
                highest += 1
                with contextlib.suppress(FileExistsError):
                    os.link(unnamed, self._path(highest))
                    return fd, highest
        finally:
            unnamed.unlink()

    def _path(self, writer: int) -> Path:
        return self._directory / f"{writer:08d}{_WRITER_SUFFIX}"


class Journal:
    """The segments of one directory. All methods block: call them outside the event loop."""

    def __init__(
        self,
        directory: Path,
        segment_bytes: int = SEGMENT_BYTES,
        writable: bool = True,
        writers: JournalWriters | None = None,
    ) -> None:
        """``writers``: the writer numbers, if several processes append here; None: at most this process does.

        ``segment_bytes``: the size above which a new segment is begun. Without ``writable``, blobs can only be read.
        """
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._writable = writable
        self._writers = writers
        self._writer = _ALONE if writers is None else writers.own
        self._segment = self._writer * _SEGMENTS_OF_WRITER  # the last segment of this writer
        self._fd: int | None = None  # of that segment while it is open; None: the next append opens a new one
        self._end = 0  # offset of the next blob in the current segment
        if writable:
            directory.mkdir(mode=0o700, exist_ok=True)
            own = [number for number in self.segments() if _writer_of(number) == self._writer]
            if own:
                self._segment = own[-1]

    def append(self, blobs: Sequence[bytes]) -> list[BlobRef]:
        """Write all blobs or none of them, and return their places. Call it in one thread only."""
        self._check_writable()
        parts: list[bytes] = []
        for blob in blobs:
            parts += (_HEADER.pack(_MAGIC, _checksum(blob), len(blob)), blob)
        size = sum(map(len, parts))
        try:
            fd = self._segment_for(size)
            self._write(fd, parts, size)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise StorageFullError(error.errno, f"no room for {size} bytes in {self._directory}") from error
            raise
        refs = []
        for blob in blobs:
            refs.append(BlobRef(self._segment, self._end, len(blob)))
            self._end += _HEADER.size + len(blob)
        return refs

    def read(self, ref: BlobRef) -> bytes:
        """Return a blob; JournalError if it is missing or its checksum is wrong."""
        try:
            fd = os.open(self._path(ref.segment), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise JournalError(f"{ref} is gone: its segment was deleted from {self._directory}") from None
        try:
            header = os.pread(fd, _HEADER.size, ref.offset)
            data = _read_exactly(fd, ref.length, ref.offset + _HEADER.size)
        finally:
            os.close(fd)
        if header != _HEADER.pack(_MAGIC, _checksum(data), ref.length):
            raise JournalError(f"{ref} in {self._directory} is damaged")
        return data

    def segments(self) -> list[int]:
        """Return the numbers of all segments on disk, in ascending order: by writer, and for each writer by age."""
        return sorted(int(path.stem) for path in self._directory.glob(f"*{_SUFFIX}"))

    def closed_segments(self) -> list[int]:
        """Return the numbers of the segments to which nothing will be appended any more."""
        self._check_writable()  # a journal opened for reading does not know the current segment of the server
        return [number for number in self.segments() if self._is_closed(number)]

    def writers_left(self) -> set[int]:
        """Return the numbers of all writers that have a segment on disk."""
        return {_writer_of(number) for number in self.segments()}

    def _is_closed(self, number: int) -> bool:
        if _writer_of(number) == self._writer:
            return self._fd is None or number != self._segment
        return self._writers is None or self._writers.is_dead(_writer_of(number))

    def delete_segments(self, segments: Iterable[int]) -> None:
        """Delete these closed segments.

        The caller lists the segments to delete, not those to retain, so a segment that is created meanwhile is safe.
        """
        self._check_writable()
        for number in segments:
            assert self._fd is None or number != self._segment, f"segment {number} is being written"
            self._path(number).unlink(missing_ok=True)

    def size(self, segments: Iterable[int] | None = None) -> int:
        """Return the total size of these segments in bytes; None: of all segments."""
        total = 0
        for number in self.segments() if segments is None else segments:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                total += self._path(number).stat().st_size
        return total

    def close(self) -> None:
        self._close_segment()
        self._writable = False

    def _check_writable(self) -> None:
        if not self._writable:
            raise StoreClosedError(f"the journal {self._directory} is closed or was opened for reading")

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08d}{_SUFFIX}"

    def _segment_for(self, size: int) -> int:
        """Return the file descriptor of a segment with room for ``size`` bytes, opening a new one if necessary."""
        if self._fd is not None and self._end > 0 and self._end + size > self._segment_bytes:
            self._close_segment()
        if self._fd is None:
            # If this fails, the next append tries the same number again. O_EXCL protects against a second writer.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path(self._segment + 1), flags, 0o600)
            self._segment += 1
            self._end = 0
        return self._fd

    def _write(self, fd: int, parts: list[bytes], size: int) -> None:
        """Write all parts, if possible with one system call: after each, the thread may wait for the interpreter."""
        try:
            written = os.writev(fd, parts[:_MAX_PARTS])
            if written < size:
                # More than _MAX_PARTS parts, more than 2 GiB, or a full disk, which the next call reports.
                rest = memoryview(b"".join(parts))[written:]
                while rest:
                    rest = rest[os.write(fd, rest) :]
        except OSError:
            self._take_back(fd)
            raise

    def _take_back(self, fd: int) -> None:
        """Remove the bytes of a failed append from the current segment."""
        try:
            os.ftruncate(fd, self._end)
        except OSError:
            self._close_segment()  # its end is unknown now: the next append opens a new segment

    def _close_segment(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _writer_of(segment: int) -> int:
    return segment // _SEGMENTS_OF_WRITER


def _checksum(data: bytes) -> int:
    return zlib.crc32(data, len(data) & 0xFFFFFFFF)


def _read_exactly(fd: int, length: int, offset: int) -> bytes:
    data = os.pread(fd, length, offset)
    while len(data) < length:  # pread stops at 2 GiB
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
