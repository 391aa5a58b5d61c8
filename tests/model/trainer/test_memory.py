"""Free host memory: the kernel's estimate, and a container's limit."""

from pathlib import Path

import pytest

from twinkle.model.trainer.memory import _available_host_bytes

MEMINFO = "MemTotal:       24000000 kB\nMemFree:          200000 kB\nMemAvailable:    9000000 kB\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def limit(root: Path, most: str, used: int) -> None:
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")


def test_the_file_cache_counts_as_available(root: Path) -> None:
    assert _available_host_bytes(root) == 9_000_000 * 1024


@pytest.mark.parametrize(
    ("most", "used", "left"),
    [("max", 5, 9_000_000 * 1024), (str(2**30), 2**29, 2**29), (str(2**40), 0, 9_000_000 * 1024), ("1000", 2000, 0)],
)
def test_a_containers_limit_holds(root: Path, most: str, used: int, left: int) -> None:
    limit(root, most, used)
    assert _available_host_bytes(root) == left


def test_this_machine_has_some(tmp_path: Path) -> None:
    assert _available_host_bytes() > 0
