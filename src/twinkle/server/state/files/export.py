"""Export of files: into allowed directories, encrypted for recipients that the tenant names, or as a tar stream."""

import json
import tarfile
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pyrage

from twinkle.errors import InvalidInputError
from twinkle.model.types import tinker_name
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
_MOST_NAMES = 100_000_000  # bytes of the names in a safetensors file, by its format
_END = bytes(2 * _BLOCK)
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class _Member:
    """A file of a tar archive. ``length`` bytes are sent: those of ``begin``, and then the rest of ``content``.

    ``checksum``: of what was read of the content already. ``expected``: of all of it; None: it is not known.
    """

    header: bytes
    content: BinaryIO
    length: int
    begin: bytes = b""
    checksum: int = 0
    expected: int | None = None


class TarStream:
    """The files of a directory as a tar archive, made piece by piece, without ``checksums.json`` and symbolic links.

    All files are opened at the beginning, so a file that is deleted while the archive is sent is still sent completely.
    """

    def __init__(
        self, directory: Path, name: str, modified: float, last: str | None = None, family: str | None = None
    ) -> None:
        """Open all files. Blocks.

        ``name``: the directory inside the archive that holds the files; empty: they are at the top. ``modified``: the
        time of all files. ``last``: the name of an empty file that is added after all others, so that a reader of the
        archive can see that nothing is missing. ``family``: an adapter on a model of this family has the names of
        Tinker's files. All parameters of a model keep their names: its index has them, too.
        """
        self._open = ExitStack()
        self._members: list[_Member] = []
        self._modified = int(modified)
        sums = read_checksums(directory) or {}
        for file in sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()):
            if file.name == CHECKSUMS:
                continue
            content = self._open.enter_context(file.open("rb"))
            inside = file.relative_to(directory).as_posix()
            expected = sums.get(inside)
            old, new = b"", b""
            if family is not None and file.name == _ADAPTER:
                old, new = _renamed(content, family)
            self._members.append(
                _Member(
                    self._header(f"{name}/{inside}" if name else inside, file.stat().st_size),
                    content,
                    file.stat().st_size,
                    begin=new,
                    checksum=zlib.crc32(old),
                    expected=expected and expected[1],
                )
            )
        self.empty = not self._members
        if last is not None:
            self._members.append(_Member(self._header(last, 0), BytesIO(), 0))

    def _header(self, path: str, length: int) -> bytes:
        info = tarfile.TarInfo(path)
        info.size, info.mtime, info.mode = length, self._modified, 0o644
        return info.tobuf(tarfile.PAX_FORMAT)

    @property
    def size(self) -> int:
        sizes = (len(each.header) + each.length + _padding(each.length) for each in self._members)
        return sum(sizes) + len(_END)

    async def pieces(self, threads: FairPool, tenant_id: str) -> AsyncIterator[bytes]:
        """Yield the archive in pieces. Files are read in ``threads``, within the tenant's share of them.

        Raises OSError at the end of a file that does not have its checksum, or that has become shorter.
        """
        with self._open:
            for member in self._members:
                yield member.header + member.begin
                left, checksum = member.length - len(member.begin), member.checksum
                while left:
                    piece = await threads.in_thread(tenant_id, partial(member.content.read, min(left, _PIECE)))
                    if not piece:
                        raise OSError("a file became shorter while it was sent")
                    left -= len(piece)
                    checksum = zlib.crc32(piece, checksum)
                    if left == 0 and member.expected not in (None, checksum):  # break off: better than a wrong file
                        raise OSError("a file of the checkpoint is damaged: it is not as it was written")
                    yield piece
                yield bytes(_padding(member.length))
            yield _END


def _renamed(content: BinaryIO, family: str) -> tuple[bytes, bytes]:
    """Read the names of tensors at the beginning of a safetensors file, and return it as it is and with other names.

    Nothing is read if no name changes. Both have the same length: the format allows spaces at the end of the names.
    """
    size = content.read(8)
    names = content.read(min(int.from_bytes(size, "little"), _MOST_NAMES))
    try:
        tensors = json.loads(names)
        renamed = json.dumps(
            {tinker_name(name, family): about for name, about in tensors.items()}, separators=(",", ":")
        )
    except (ValueError, AttributeError):  # damaged: sending it fails, because its checksum is wrong
        tensors, renamed = {}, ""
    if len(renamed) > len(names) or not any(tinker_name(name, family) != name for name in tensors):
        content.seek(0)
        return b"", b""
    return size + names, size + renamed.encode().ljust(len(names))


def _padding(length: int) -> int:
    return -length % _BLOCK
