"""The host memory that this process may use: limited by the machine and by every control group (v1 and v2) it is in.

The kernel kills a process when its control group, or any group around that one, exceeds its limit. Pages of files that
the kernel can drop do not count as used. All files are read again at each call, since a process may be moved to another
group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["HostMemory", "host_memory_limit", "read_host_memory"]


@dataclass(frozen=True)
class HostMemory:
    """Bytes that the process and its neighbours in the same group may use together, and how many they use."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Return limit and use of what has the least memory left: the machine or one of the groups.

    This reads a few small files.
    """
    return min((_machine(root), *_groups(root)), key=lambda memory: memory.free)


def host_memory_limit(root: Path = Path("/")) -> int:
    """Return the most bytes that this process may have under the present limits: the lowest of them."""
    return min(memory.limit for memory in (_machine(root), *_groups(root)))


def _machine(root: Path) -> HostMemory:
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return HostMemory(total, total - available)


def _groups(root: Path) -> Iterator[HostMemory]:
    """Yield the groups of this process that have a limit, from the innermost to the outermost."""
    mounts = root / "sys/fs/cgroup"
    v1, v2 = _paths(root)
    for mount in (mounts, mounts / "unified"):  # the second where both versions are in use
        for directory in _upwards(mount, v2):
            yield from _read(directory, _V2)
    for directory in _upwards(mounts / "memory", v1):
        yield from _read(directory, _V1)


def _paths(root: Path) -> tuple[str, str]:
    """Return the paths of this process's groups, v1 (memory controller) and v2, below their mount points."""
    v1 = v2 = "/"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            v2 = path
        elif "memory" in controllers.split(","):
            v1 = path
    return v1, v2


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield the directories of a group and of all groups around it.

    In a container the path may be that of the host machine, so that only the mount point itself exists.
    """
    inner = PurePosixPath(path)
    for each in (inner, *inner.parents):
        yield mount / each.relative_to("/")


@dataclass(frozen=True)
class _Files:
    """The names of the files of one cgroup version, and of the fields of memory.stat that count file pages."""

    limits: tuple[str, ...]
    used: str
    inactive: str
    active: str
    mapped: str
    reclaimable: str


_V1 = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
    "total_mapped_file",
    "",
)
# Above memory.high a process is not killed, but slowed down so much that it no longer makes progress.
_V2 = _Files(
    ("memory.max", "memory.high"),
    "memory.current",
    "inactive_file",
    "active_file",
    "file_mapped",
    "slab_reclaimable",
)


def _read(directory: Path, files: _Files) -> Iterator[HostMemory]:
    """Yield the memory of a group if it has a limit; a group that does not exist (any more) has none."""
    try:
        limit = min(filter(None, (_limit(directory / name) for name in files.limits)), default=None)
        if limit is None:
            return
        used = int((directory / files.used).read_text())
    except (OSError, ValueError):
        return
    yield HostMemory(limit, max(0, used - _droppable(directory, files)))


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except FileNotFoundError:  # memory.high of an old kernel
        return None
    return None if text == "max" else int(text)


def _droppable(directory: Path, files: _Files) -> int:
    """Return the bytes of file pages that no process has mapped, which the kernel can drop.

    Mapped pages count as used: they may be weights that a model reads directly from its file.
    """
    try:
        lines = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
        fields = {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return 0
    unmapped = fields.get(files.active, 0) - fields.get(files.mapped, 0)
    return fields.get(files.inactive, 0) + max(0, unmapped) + fields.get(files.reclaimable, 0)
