"""A server process with a memory limit, set by a cgroup (v1 or v2) or, if none can be created, by a watcher.

RLIMIT_AS would count address space, of which torch reserves far more than it uses.
"""

import contextlib
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Self

from tests.support.servers.running import Server

GIB = 2**30
LIMIT = 3 * GIB
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_WATCH_SECONDS = 0.05


class Confinement:
    """A limit on the memory that a process and all its children use together."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.exceeded = False  # the watcher saw more than the limit
        self._kills_at_end: int | None = None  # known once the cgroup is removed
        self._group = _new_group(limit)
        self._stop = threading.Event()

    @property
    def kind(self) -> str:
        return "watcher" if self._group is None else "cgroup"

    def admit(self, pid: int) -> None:
        """Put a process, which must not have children yet, under the limit."""
        if self._group is None:
            threading.Thread(target=self._watch, args=(pid,), daemon=True).start()
        else:
            (self._group / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """Return how often the kernel killed a process for memory, or 1 if the watcher saw too much."""
        if self._group is None:
            return int(self.exceeded)
        if self._kills_at_end is not None:
            return self._kills_at_end
        v2 = self._group / "memory.events"
        text = (v2 if v2.exists() else self._group / "memory.oom_control").read_text()
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)

    def peak(self) -> int:
        """Return the largest number of bytes in use so far, with page cache; 0 if there is only a watcher."""
        if self._group is None:
            return 0
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            with contextlib.suppress(OSError):
                return int((self._group / name).read_text())
        return 0

    def close(self) -> None:
        self._stop.set()
        if self._group is not None:
            self._kills_at_end = self.kills()
            for _ in range(100):
                with contextlib.suppress(OSError):
                    self._group.rmdir()
                    return
                time.sleep(0.05)

    def _watch(self, pid: int) -> None:
        while not self._stop.wait(_WATCH_SECONDS):
            if resident_bytes(pid) > self.limit:
                self.exceeded = True


class ConfinedServer(Server):
    """A :class:`Server` under a memory limit, in its own cgroup while the test lasts."""

    confinement: Confinement

    def confine(self, limit: int = LIMIT) -> Self:
        """Set the limit. Call this before the first start."""
        self.confinement = Confinement(limit)
        return self

    def spawn(self) -> Self:
        super().spawn()
        assert self.process is not None
        self.confinement.admit(self.process.pid)
        return self

    def close(self) -> None:
        super().close()
        self.confinement.close()

    def rss(self) -> int:
        """Return the resident bytes of the server and its children."""
        assert self.process is not None
        return resident_bytes(self.process.pid)


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; 0 if it has ended."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += sum(map(resident_bytes, map(int, (task / "children").read_text().split())))
    return total


def _new_group(limit: int) -> Path | None:
    """Create a memory cgroup; return None if the system does not allow it."""
    name = f"twinkle-test-{uuid.uuid4().hex[:8]}"
    for root, file in ((_V1, "memory.limit_in_bytes"), (_V2, "memory.max")):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
            return group
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
    return None
