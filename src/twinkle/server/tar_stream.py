"""A directory as a tar file that is never whole anywhere: headers and pieces of files, one after another."""

import asyncio
import tarfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

_PIECE = 2**20  # bytes in memory at a time
_BLOCK = 512
_END = bytes(2 * _BLOCK)


class TarStream:
    """All files are open from the beginning: what is deleted meanwhile is sent whole all the same."""

    def __init__(self, directory: Path, name: str, modified: float) -> None:
        """``name``: of the directory inside the archive. Blocks."""
        self._open = ExitStack()
        self._members: list[tuple[bytes, BinaryIO, int]] = []  # header, content, its length
        for file in sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()):
            content = self._open.enter_context(file.open("rb"))
            length = file.stat().st_size
            info = tarfile.TarInfo(f"{name}/{file.relative_to(directory).as_posix()}")
            info.size, info.mtime, info.mode = length, int(modified), 0o644
            self._members.append((info.tobuf(tarfile.PAX_FORMAT), content, length))

    @property
    def size(self) -> int:
        return sum(len(header) + length + _padding(length) for header, _, length in self._members) + len(_END)

    async def pieces(self) -> AsyncIterator[bytes]:
        with self._open:
            for header, content, length in self._members:
                yield header
                left = length
                while left:
                    piece = await asyncio.to_thread(content.read, min(left, _PIECE))
                    if not piece:
                        raise OSError(f"{content.name} became shorter while it was sent")
                    left -= len(piece)
                    yield piece
                yield bytes(_padding(length))
            yield _END


def _padding(length: int) -> int:
    return -length % _BLOCK
