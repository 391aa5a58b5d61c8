"""Export of files: into allowed directories, encrypted for recipients that the tenant names, or as a tar stream."""

import tarfile
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pyrage

from twinkle.errors import InvalidInputError
from twinkle.server.ids import is_native_run
from twinkle.server.state.files.file_checksums import CHECKSUMS, read_checksums
from twinkle.server.tenancy.work_pools import FairPool


def allowed_path(field: str, text: str, allowed: Sequence[Path]) -> Path:
    """Return ``text`` as a path without symbolic links.

    InvalidInputError unless it is an absolute path in one of the ``allowed`` directories.

    For a path elsewhere, the error does not reveal whether the path exists.
    """
    path = Path(text)
    if path.is_absolute() and "\x00" not in text:
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError):  # symbolic links in a circle
            resolved = Path()
        if any(resolved.is_relative_to(directory.resolve()) for directory in allowed):
            return resolved
    where = "an absolute path in one of the server's allowed_dirs" if allowed else "nothing: allowed_dirs is empty"
    raise InvalidInputError(field, text, where)


def existing_dir(field: str, text: str, allowed: Sequence[Path]) -> Path:
    """Return the path of a directory that exists and is :func:`allowed_path`.

    InvalidInputError also for a directory inside the folder that holds the copied checkpoints of a run.
    """
    path = allowed_path(field, text, allowed)
    inside = next(path.relative_to(each.resolve()) for each in allowed if path.is_relative_to(each.resolve()))
    if any(is_native_run(part) or is_native_run(part.rstrip("+")) for part in inside.parts):
        raise InvalidInputError(field, text, "a directory that is not part of a run's own folder")
    try:
        exists = path.is_dir()
    except OSError:  # the name is too long
        exists = False
    if not exists:
        raise InvalidInputError(field, text, "a directory that exists on the server")
    return path


# --- encryption with age (age-encryption.org): only the recipients can read the files, not this server ----------------

_MOST_RECIPIENTS = 20
_ALLOWED = "an age recipient (age1…) or an SSH public key (ssh-ed25519 … or ssh-rsa …)"


def check_recipients(recipients: Sequence[str], field: str) -> None:
    """Raise InvalidInputError if there are none or too many recipients, or for the first one that is not valid."""
    if not 1 <= len(recipients) <= _MOST_RECIPIENTS:
        raise InvalidInputError(field, f"{len(recipients)} recipients", f"1 to {_MOST_RECIPIENTS}, or null")
    for index, recipient in enumerate(recipients):
        try:
            _recipient(recipient)
        except pyrage.RecipientError as error:
            raise InvalidInputError(f"{field}[{index}]", recipient, f"{_ALLOWED}: {error}") from None


def encrypt_files(directory: Path, recipients: Sequence[str]) -> None:
    """Replace each file of the directory by its encrypted form ``<file>.age``."""
    readers = [_recipient(recipient) for recipient in recipients]
    for file in sorted(directory.iterdir()):
        pyrage.encrypt_file(str(file), str(file.with_name(f"{file.name}.age")), readers)
        file.unlink()


def _recipient(text: str) -> Any:
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    return kind.Recipient.from_str(text)


# --- tar streams: archives that are sent while they are made, and never stored ----------------------------------------

_PIECE = 2**20  # bytes in memory at a time
_BLOCK = 512
_END = bytes(2 * _BLOCK)


class TarStream:
    """The files of a directory as a tar archive, made piece by piece, without ``checksums.json`` and symbolic links.

    All files are opened at the beginning, so a file that is deleted while the archive is sent is still sent completely.
    """

    def __init__(self, directory: Path, name: str, modified: float, last: str | None = None) -> None:
        """Open all files. Blocks.

        ``name``: the directory inside the archive that holds the files; empty: they are at the top. ``modified``: the
        time of all files. ``last``: the name of an empty file that is added after all others, so that a reader of the
        archive can see that nothing is missing.
        """
        self._open = ExitStack()
        self._members: list[tuple[bytes, BinaryIO, int, int | None]] = []  # header, content, its length, its checksum
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
        """Yield the archive in pieces. Files are read in ``threads``, within the tenant's share of them.

        Raises OSError at the end of a file that does not have its checksum, or that has become shorter.
        """
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
                    if left == 0 and expected not in (None, checksum):  # break off: better than a wrong file
                        raise OSError("a file of the checkpoint is damaged: it is not as it was written")
                    yield piece
                yield bytes(_padding(length))
            yield _END


def _padding(length: int) -> int:
    return -length % _BLOCK
