"""Paths under the data directory, and adapter snapshots as files.

state.db, secret, lock                   the database, unless another is configured, the secret, and the lock
server.json                              process id and URL of the running server
generated-key                            the key that a launch generated, unless it was shown on a terminal
copies/                                  copies of the database and the secret, used when the originals are damaged
reserve                                  a file that is deleted to free space when the disk is full
journal/                                 bodies and outcomes of ops
running/                                 the ops that run now, a file for each training service
snapshots/<run>/<seq>-<random>/          adapters as they were after op <seq>, for recovery
checkpoints/<run>/<kind>/<name>/<seq>/   checkpoints that tenants saved with op <seq>
samplers/<sampler>-<number>-<seq>/       unnamed versions of sampling session <sampler>, saved with op <seq> of the
                                         session's run with this number
processors/<worker>/                     files of a session's datasets, deleted when their process ends
server.log                               the log of a server that ``launch --no-wait`` started
logs/<replica>.log                       the log of each process of a server on Ray

Directories of snapshots, checkpoints and sampler versions hold a file ``checksums.json`` (:mod:`file_checksums`).
Only the server's user may read them, whatever the mode of the data directory is.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from twinkle.errors import CheckpointError
from twinkle.model.types import AdapterSnapshot
from twinkle.server.ids import CheckpointPath, directory_name
from twinkle.server.state.files.file_checksums import CHECKSUMS, check_files, write_checksums
from twinkle.server.types import read_spec, stored_spec

_BESIDE = "native.pt"  # a fixed name: the native protocol was the first to store something there
_ARRAYS = ("weights", "exp_avg", "exp_avg_sq", "gradient")


@dataclass(frozen=True)
class DataDir:
    """The paths under the data directory ``root``. Records in the database name paths relative to it."""

    root: Path

    def checkpoint(self, path: CheckpointPath, seq: int) -> Path:
        """Return the directory for a checkpoint that op ``seq`` saves. No other op uses it.

        A name may be saved again, but samplers may still use the files of the earlier checkpoint, which never change.
        """
        return self.root / "checkpoints" / directory_name(path.run_id) / path.kind / path.name / str(seq)

    def sampler(self, sampling_session_id: str, run_number: int, seq: int) -> Path:
        """Return the directory for an unnamed sampler version that op ``seq`` saves. No other op uses it.

        The sampling session alone is not enough: a client may use one number for two sampling sessions by mistake.
        """
        return self.root / "samplers" / f"{directory_name(sampling_session_id)}-{run_number}-{seq}"

    def mark_used(self, recorded: str) -> None:
        """Note that the directory that a record names is used now. If it is gone, nothing happens."""
        with suppress(OSError):
            os.utime(self.root / recorded)

    def last_used(self, recorded: str) -> float:
        """Return the Unix time at which a directory was made, or was last marked as used; 0 if it is gone."""
        try:
            return (self.root / recorded).stat().st_mtime
        except OSError:
            return 0.0

    def snapshot(self, run_id: str, seq: int) -> Path:
        """Return the path for a new snapshot, another one at each call: the last snapshot must stay as it is until the
        record of the new one is stored.
        """
        return self.snapshots(run_id) / f"{seq}-{secrets.token_hex(4)}"

    def snapshots(self, run_id: str) -> Path:
        return self.root / "snapshots" / directory_name(run_id)

    def remove(self, relative: str) -> None:
        """Delete the directory that a record names."""
        shutil.rmtree(self.root / relative, ignore_errors=True)

    def beside(self, directory: Path) -> list[str]:
        """Return the directories of other saves under the same checkpoint name, relative to the data directory."""
        found = [other for other in directory.parent.iterdir() if other != directory and not other.name.startswith(".")]
        return [self.relative(other) for other in found]

    def remove_empty(self, recorded: str) -> None:
        """Remove a run's empty checkpoint directories, after its checkpoint in the directory ``recorded`` was deleted.

        No op may be saving a checkpoint of this run.
        """
        checkpoints, run = Path(recorded).parts[:2]
        _remove_empty(self.root / checkpoints / run)

    def remove_snapshots(self, run_id: str, recorded: str | None) -> None:
        """Remove all snapshots of a run.

        ``recorded``: the directory of the one on record, which an earlier version of Twinkle may have put elsewhere.
        """
        shutil.rmtree(self.snapshots(run_id), ignore_errors=True)
        if recorded is not None:
            self._remove_snapshot(self.root / recorded)

    def remove_older_snapshots(self, newest: Path, replaced: str | None) -> None:
        """Remove all snapshots of a run except the newest.

        ``replaced``: the directory of the one that was on record before, which may be elsewhere.
        """
        for other in newest.parent.iterdir():
            if other != newest:
                shutil.rmtree(other, ignore_errors=True)
        if replaced is not None and self.root / replaced != newest:
            self._remove_snapshot(self.root / replaced)

    def _remove_snapshot(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # not empty, or gone already
            directory.parent.rmdir()

    def remove_unfinished(self, idle_seconds: float = 0.0) -> None:
        """Remove unfinished directories that were being written when a process crashed.

        Only directories that have not changed for ``idle_seconds`` are removed, so other processes may be writing
        meanwhile. With 0, no process may be writing, and empty checkpoint directories are removed too.
        """
        before = time.time() - idle_seconds
        for place in ("checkpoints/*/*/*/.*.tmp", "samplers/.*.tmp", "snapshots/*/.*.tmp", "snapshots/*/.*.partial"):
            for leftover in self.root.glob(place):
                with suppress(FileNotFoundError):  # it was finished and renamed meanwhile
                    if leftover.stat().st_mtime <= before:
                        shutil.rmtree(leftover, ignore_errors=True)
        if idle_seconds:
            return
        for run in self.root.glob("checkpoints/*"):
            _remove_empty(run)

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.root))


def write_snapshot(directory: Path, snapshot: AdapterSnapshot, beside: bytes | None) -> None:
    """Write a snapshot, completely or not at all. ``beside``: bytes that are stored besides the trainer's state."""
    write_whole(directory, partial(_fill_snapshot, snapshot, beside))


def _fill_snapshot(snapshot: AdapterSnapshot, beside: bytes | None, directory: Path) -> None:
    for name in _ARRAYS:
        array = vars(snapshot)[name]
        if array is not None:
            np.save(directory / f"{name}.npy", array, allow_pickle=False)
    if beside is not None:
        (directory / _BESIDE).write_bytes(beside)
    meta = {
        "spec": stored_spec(snapshot.spec),
        "step": snapshot.step,
        "passes": snapshot.passes,
        "layout": snapshot.layout,
        "optimizer": snapshot.optimizer,
        "scalars": dict(snapshot.scalars),
    }
    (directory / "meta.json").write_text(json.dumps(meta))


def read_snapshot(directory: Path) -> AdapterSnapshot:
    """Return a snapshot after comparing its files with their checksums, if it has any; CheckpointError if damaged."""
    check_files(directory)
    try:
        meta = json.loads((directory / "meta.json").read_text())
        arrays = {name: _read_array(directory / f"{name}.npy") for name in _ARRAYS}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"snapshot {directory.name} cannot be read: {error}") from error
    # Older snapshots are Adam's, and have no number of passes.
    newer = {name: meta[name] for name in ("passes", "optimizer", "scalars") if name in meta}
    return AdapterSnapshot(read_spec(meta["spec"]), meta["step"], meta["layout"], **arrays, **newer)


def _read_array(file: Path) -> Any:
    """Return an array. For the gradient return None if there is no file: only an open window has a gradient."""
    is_there = file.name != "gradient.npy" or file.exists()
    return np.load(file, allow_pickle=False) if is_there else None


def read_state_beside(directory: Path) -> bytes | None:
    """Return the bytes that a snapshot stores besides the trainer's state, or None."""
    file = directory / _BESIDE
    return file.read_bytes() if file.exists() else None


def _remove_empty(directory: Path) -> None:
    """Remove the directory and those inside it, except directories that contain files."""
    for inner, _, _ in os.walk(directory, topdown=False):
        with suppress(OSError):  # it is not empty, or was removed meanwhile
            os.rmdir(inner)


def copy_whole(source: Path, target: Path, *, private: bool = True) -> None:
    """Copy a directory to ``target``, completely or not at all. CheckpointError if the source is damaged.

    ``private``: only this process's user may read the copy. Otherwise its modes are those of new files (umask).
    """
    check_files(source)
    write_whole(target, partial(_copy_files, source), private=private)


def _copy_files(source: Path, target: Path) -> None:
    """Copy all files. shutil.copytree would continue after an error, and then raise one that hides the cause."""
    for entry in sorted(os.scandir(source), key=lambda each: each.name):
        if entry.is_dir():
            (target / entry.name).mkdir()
            _copy_files(Path(entry.path), target / entry.name)
        else:
            shutil.copy2(entry.path, target / entry.name)
    shutil.copystat(source, target)


def write_whole(directory: Path, fill: Callable[[Path], None], *, private: bool = True) -> None:
    """Call ``fill`` to write a directory. It gets its final name once all of it is on disk, or not at all.

    A directory that has this name already is replaced.

    When this returns, the directory and its parents are synced to disk: an older version of it may be deleted.
    """
    new_parents = make_parents(directory, private=private)
    staging = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    staging.mkdir(mode=0o700)
    try:
        fill(staging)
        seal(staging, private=private)
        sync_all(staging)
        shutil.rmtree(directory, ignore_errors=True)  # left by the same op, which runs again after a crash
        os.replace(staging, directory)
        for parent in (directory.parent, *(new.parent for new in new_parents)):
            sync(parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def make_parents(directory: Path, *, private: bool = True) -> list[Path]:
    """Create the missing parents of a directory that will be written; return those that are new."""
    new = [parent for parent in directory.parents if not parent.exists()]
    for parent in reversed(new):
        parent.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
    return new


def seal(directory: Path, *, private: bool = True) -> None:
    """Write the checksums of all files, and set the modes; ``private``: only this process's user may read the files."""
    write_checksums(directory)
    restrict(directory, 0o077 if private else _umask())


def restrict(path: Path, taken: int = 0o077) -> None:
    """Set the mode of a file, or of a directory and all in it, to 666 (directories: 777) without the bits ``taken``.

    By default only the owner may read and write afterwards.
    """
    for each in (path, *path.rglob("*")):
        each.chmod((0o777 if each.is_dir() else 0o666) & ~taken)


def _umask() -> int:
    """Return the umask of this process. It can only be read by setting it."""
    taken = os.umask(0o077)
    os.umask(taken)
    return taken


def seal_written(directory: Path, *, synced: bool = True) -> None:
    """Seal (see :func:`seal`) a directory that the training backend wrote, and sync its checksums, unless ``synced`` is
    False.

    Call it before the directory's record is stored.
    """
    seal(directory)
    if synced:
        sync(directory / CHECKSUMS)
        sync(directory)


def sync_all(directory: Path) -> None:
    """Sync a directory and everything in it to disk."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def sync(path: Path) -> None:
    """Sync one file, or the list of names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_of(directory: Path) -> int:
    """Return the total size of the files in bytes. The server's own ``checksums.json`` does not count."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file() and file.name != CHECKSUMS)
