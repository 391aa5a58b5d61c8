"""A directory as a tar file that is never whole anywhere: headers and pieces of files, one after another."""

import tarfile
import zlib
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from twinkle.server.state.files.file_checksums import CHECKSUMS, read_checksums
from twinkle.server.tenancy.work_pools import FairPool

_PIECE = 2**20  # bytes in memory at a time
_BLOCK = 512
_END = bytes(2 * _BLOCK)


class TarStream:
    """All files are open from the beginning: what is deleted meanwhile is sent whole all the same."""

    def __init__(self, directory: Path, name: str, modified: float, last: str | None = None) -> None:
        """``name``: of the directory inside the archive; empty: the files lie at its top. ``last``: an empty file that
        is added behind all others, by which a reader knows that nothing is missing. Blocks.
        """
        self._open = ExitStack()
        self._members: list[tuple[bytes, BinaryIO, int, int | None]] = []  # header, content, its length and checksum
        self._modified = int(modified)
        sums = read_checksums(directory) or {}
        for file in sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()):
            if file.name == CHECKSUMS:
                continue
            content = self._open.enter_context(file.open("rb"))
            inside = file.relative_to(directory).as_posix()
            expected = sums.get(inside)
            self._add(f"{name}/{inside}" if name else inside, content, file.stat().st_size, expected and expected[1])
        self.empty = not self._members
        if last is not None:
            self._add(last, BytesIO(), 0)

    def _add(self, path: str, content: BinaryIO, length: int, checksum: int | None = None) -> None:
        info = tarfile.TarInfo(path)
        info.size, info.mtime, info.mode = length, self._modified, 0o644
        self._members.append((info.tobuf(tarfile.PAX_FORMAT), content, length, checksum))

    @property
    def size(self) -> int:
        return sum(len(header) + length + _padding(length) for header, _, length, _ in self._members) + len(_END)

    async def pieces(self, threads: FairPool, tenant_id: str) -> AsyncIterator[bytes]:
        """Yield the archive; files are read in the tenant's share of ``threads``."""
        with self._open:
            for header, content, length, expected in self._members:
                yield header
                left, checksum = length, 0
                while left:
                    piece = await threads.in_thread(tenant_id, partial(content.read, min(left, _PIECE)))
                    if not piece:
                        raise OSError("a file became shorter while it was sent")
                    left -= len(piece)
                    checksum = zlib.crc32(piece, checksum)
                    if left == 0 and expected not in (None, checksum):  # better no archive than one with a wrong file
                        raise OSError("a file of the checkpoint is damaged: it is not as it was written")
                    yield piece
                yield bytes(_padding(length))
            yield _END


def _padding(length: int) -> int:
    return -length % _BLOCK
