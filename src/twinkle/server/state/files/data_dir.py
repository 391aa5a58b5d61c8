"""Where things lie under the data directory, and adapter snapshots as files.

state.db, secret, lock                   the database and what guards it
copies/, reserve                         of these, for when they are damaged; space for when the disk is full
journal/                                 bodies and outcomes of ops
running/                                 which ops run now, a file for each model service
snapshots/<run>/<seq>/                   adapters as they were after op <seq>, for recovery
checkpoints/<run>/<kind>/<name>/<seq>/   what tenants saved, by op <seq>
samplers/<session>-<run>-<seq>/          unnamed sampler versions, by op <seq> of the session's run <run>
processors/<worker>/                     what a session's datasets keep on disk, as long as their process runs
server.log                               what a server says that ``launch --no-wait`` started
logs/<replica>.log                       what each process of a server on Ray says

Directories of snapshots, checkpoints and sampler versions hold a file ``checksums.json`` (:mod:`file_checksums`).
Nobody but the server's user may read them, whatever the mode of the data directory is.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from twinkle.errors import CheckpointError
from twinkle.model.types import AdapterSnapshot, LoraSpec
from twinkle.server.ids import CheckpointPath, directory_name
from twinkle.server.state.files.file_checksums import CHECKSUMS, check_files, write_checksums

_BESIDE = "native.pt"  # the native protocol was the first to keep something there
_ARRAYS = ("weights", "exp_avg", "exp_avg_sq", "gradient")


@dataclass(frozen=True)
class DataDir:
    root: Path

    def checkpoint(self, path: CheckpointPath, seq: int) -> Path:
        """Return a directory that no other op has: a name may be used again, but a sampler's files never change."""
        return self.root / "checkpoints" / directory_name(path.run_id) / path.kind / path.name / str(seq)

    def sampler(self, sampling_session_id: str, run_number: int, seq: int) -> Path:
        """Return a directory that no other op has: a client may give one number to two sampling sessions by mistake."""
        return self.root / "samplers" / f"{directory_name(sampling_session_id)}-{run_number}-{seq}"

    def snapshot(self, run_id: str, seq: int) -> Path:
        """Return a new directory each time: a snapshot is not touched before the next one is on record."""
        return self.snapshots(run_id) / f"{seq}-{secrets.token_hex(4)}"

    def snapshots(self, run_id: str) -> Path:
        return self.root / "snapshots" / directory_name(run_id)

    def remove(self, relative: str) -> None:
        """Delete a directory by its recorded place."""
        shutil.rmtree(self.root / relative, ignore_errors=True)

    def beside(self, directory: Path) -> list[str]:
        """Return the recorded places of the other directories of a checkpoint's name."""
        found = [other for other in directory.parent.iterdir() if other != directory and not other.name.startswith(".")]
        return [self.relative(other) for other in found]

    def remove_empty(self, recorded: str) -> None:
        """Remove a run's directories of checkpoints where none is left. Nobody may be saving to them."""
        checkpoints, run = Path(recorded).parts[:2]
        _remove_empty(self.root / checkpoints / run)

    def remove_snapshots(self, run_id: str, recorded: str | None) -> None:
        """Remove all snapshots of a run. ``recorded``: the last one; an earlier version may have put it elsewhere."""
        shutil.rmtree(self.snapshots(run_id), ignore_errors=True)
        if recorded is not None:
            self._remove_snapshot(self.root / recorded)

    def remove_older_snapshots(self, newest: Path, replaced: str | None) -> None:
        """Remove all snapshots of a run but the newest. ``replaced``: the one on record before, wherever it lies."""
        for other in newest.parent.iterdir():
            if other != newest:
                shutil.rmtree(other, ignore_errors=True)
        if replaced is not None and self.root / replaced != newest:
            self._remove_snapshot(self.root / replaced)

    def _remove_snapshot(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # others are there, or it is gone
            directory.parent.rmdir()

    def remove_unfinished(self, idle_seconds: float = 0.0) -> None:
        """Remove what a crash left of directories that were being written.

        Others may be writing, if whoever is at it would have changed something in the last ``idle_seconds``; with 0
        nobody may.
        """
        before = time.time() - idle_seconds
        for place in ("checkpoints/*/*/*/.*.tmp", "samplers/.*.tmp", "snapshots/*/.*.tmp", "snapshots/*/.*.partial"):
            for leftover in self.root.glob(place):
                with suppress(FileNotFoundError):  # it has just got its name
                    if leftover.stat().st_mtime <= before:
                        shutil.rmtree(leftover, ignore_errors=True)
        if idle_seconds:
            return
        for run in self.root.glob("checkpoints/*"):
            _remove_empty(run)

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.root))


def write_snapshot(directory: Path, snapshot: AdapterSnapshot, beside: bytes | None) -> None:
    """Write a snapshot, whole or not at all. ``beside``: what is kept beside the trainer's state."""
    write_whole(directory, partial(_fill_snapshot, snapshot, beside))


def _fill_snapshot(snapshot: AdapterSnapshot, beside: bytes | None, directory: Path) -> None:
    for name in _ARRAYS:
        array = vars(snapshot)[name]
        if array is not None:
            np.save(directory / f"{name}.npy", array, allow_pickle=False)
    if beside is not None:
        (directory / _BESIDE).write_bytes(beside)
    meta = {"spec": asdict(snapshot.spec), "step": snapshot.step, "layout": snapshot.layout}
    (directory / "meta.json").write_text(json.dumps(meta))


def read_snapshot(directory: Path) -> AdapterSnapshot:
    """Return the snapshot, every byte checked; CheckpointError where it is damaged."""
    check_files(directory)
    try:
        meta = json.loads((directory / "meta.json").read_text())
        arrays = {name: _read_array(directory / f"{name}.npy") for name in _ARRAYS}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"snapshot {directory.name} cannot be read: {error}") from error
    return AdapterSnapshot(LoraSpec(**meta["spec"]), meta["step"], meta["layout"], **arrays)


def _read_array(file: Path) -> Any:
    """Return an array; None where there is no gradient, which only an open window has."""
    is_there = file.name != "gradient.npy" or file.exists()
    return np.load(file, allow_pickle=False) if is_there else None


def read_state_beside(directory: Path) -> bytes | None:
    """Return what a snapshot keeps beside the trainer's state, if there is anything."""
    file = directory / _BESIDE
    return file.read_bytes() if file.exists() else None


def _remove_empty(directory: Path) -> None:
    """Remove the directory and those in it, as far as there are no files."""
    for inner, _, _ in os.walk(directory, topdown=False):
        with suppress(OSError):  # it is not empty, or gone already
            os.rmdir(inner)


def copy_whole(source: Path, target: Path, *, private: bool = True) -> None:
    """Copy a directory to the place of another, whole or not at all. CheckpointError where the source is damaged.

    ``private``: for nobody else to read; otherwise the modes are what this process gives to new files.
    """
    check_files(source)
    write_whole(target, partial(_copy_files, source), private=private)


def _copy_files(source: Path, target: Path) -> None:
    """Copy all files. shutil.copytree would go on after an error, and raise one that does not say what was wrong."""
    for entry in sorted(os.scandir(source), key=lambda each: each.name):
        if entry.is_dir():
            (target / entry.name).mkdir()
            _copy_files(Path(entry.path), target / entry.name)
        else:
            shutil.copy2(entry.path, target / entry.name)
    shutil.copystat(source, target)


def write_whole(directory: Path, fill: Callable[[Path], None], *, private: bool = True) -> None:
    """Let ``fill`` write a directory, which gets its final name when all of it is on disk, or not at all.

    When this returns it is there to stay, with the way to it: whatever it replaces may be deleted.
    """
    new_parents = make_parents(directory, private=private)
    staging = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    staging.mkdir(mode=0o700)
    try:
        fill(staging)
        seal(staging, private=private)
        sync_all(staging)
        shutil.rmtree(directory, ignore_errors=True)  # of an op that runs again after a crash
        os.replace(staging, directory)
        for parent in (directory.parent, *(new.parent for new in new_parents)):
            sync(parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def make_parents(directory: Path, *, private: bool = True) -> list[Path]:
    """Make the directories above one that is to be written; returns those that are new."""
    new = [parent for parent in directory.parents if not parent.exists()]
    for parent in reversed(new):
        parent.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
    return new


def seal(directory: Path, *, private: bool = True) -> None:
    """Note the checksums of all files, and let nobody else read them if they are ``private``."""
    write_checksums(directory)
    restrict(directory, 0o077 if private else _umask())


def restrict(path: Path, taken: int = 0o077) -> None:
    """Take these mode bits from a file, or from a directory and all that is in it; by default those of all others."""
    for each in (path, *path.rglob("*")):
        each.chmod((0o777 if each.is_dir() else 0o666) & ~taken)


def _umask() -> int:
    """Return the mode bits that this process takes from new files. There is no way to ask but to set them."""
    taken = os.umask(0o077)
    os.umask(taken)
    return taken


def seal_written(directory: Path) -> None:
    """:func:`seal` what others wrote, before its record says that it is there."""
    seal(directory)
    sync(directory / CHECKSUMS)
    sync(directory)


def sync_all(directory: Path) -> None:
    """Put a directory on disk, with all that is in it."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def sync(path: Path) -> None:
    """Put one file, or the names that a directory holds, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_of(directory: Path) -> int:
    """Return the bytes of the tenant's files; our own checksums do not count."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file() and file.name != CHECKSUMS)
