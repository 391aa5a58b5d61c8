"""Find the processes of a server's Ray cluster by their titles."""

from pathlib import Path

from tests.support.servers.running import Server


def descendants(server: Server, title: str) -> list[int]:
    """Return the ids of this server's processes whose title contains ``title``."""
    assert server.process is not None
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # the process has just ended
                continue

    def is_ours(pid: int) -> bool:
        while pid > 1 and server.process is not None and pid != server.process.pid:
            pid = parents.get(pid, 0)
        return pid > 1

    return sorted(pid for pid, name in titles.items() if title in name and is_ours(pid))
