"""Memory limits of control groups, v1 and v2, nested, and which part of the used memory can be reclaimed."""

from pathlib import Path

import pytest

from twinkle.model.trainer.host_memory import HostMemory, host_memory_limit, read_host_memory

GIB = 2**30
MEMINFO = f"MemTotal:       {8 * 2**20} kB\nMemAvailable:    {6 * 2**20} kB\n"
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def v1(root: Path, path: str, limit: int, used: int, **stat: int) -> None:
    group = root / "sys/fs/cgroup/memory" / path
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


def v2(root: Path, path: str, limit: str, used: int, mount: str = "sys/fs/cgroup", **stat: int) -> Path:
    group = root / mount / path
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))
    return group


def test_without_groups_the_machine_counts(root: Path) -> None:
    assert read_host_memory(root) == HostMemory(8 * GIB, 2 * GIB)


def test_a_group_of_version_1(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("4:memory:/a/b\n3:cpuset:/\n0::/\n")
    v1(root, "", UNLIMITED_V1, 7 * GIB)
    v1(root, "a", UNLIMITED_V1, 5 * GIB)
    v1(root, "a/b", 3 * GIB, 2 * GIB, total_inactive_file=GIB, total_active_file=GIB // 2, total_mapped_file=GIB // 4)
    assert read_host_memory(root) == HostMemory(3 * GIB, 3 * GIB // 4)
    assert host_memory_limit(root) == 3 * GIB


def test_the_group_around_may_have_less_left(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/outer/inner\n")
    v2(root, "outer", str(4 * GIB), 7 * GIB // 2)
    v2(root, "outer/inner", str(3 * GIB), GIB)
    assert read_host_memory(root) == HostMemory(4 * GIB, 7 * GIB // 2)
    assert host_memory_limit(root) == 3 * GIB


@pytest.mark.parametrize("mount", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
def test_a_group_of_version_2(root: Path, mount: str) -> None:
    (root / "proc/self/cgroup").write_text("0::/service\n")
    group = v2(root, "service", "max", GIB, mount, inactive_file=GIB // 4, slab_reclaimable=GIB // 4)
    assert read_host_memory(root).limit == 8 * GIB
    (group / "memory.high").write_text(str(2 * GIB))
    assert read_host_memory(root) == HostMemory(2 * GIB, GIB // 2), "above high it would stand still"


def test_a_path_of_the_machine_outside_of_the_container(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/kubepods/pod/x\n4:memory:/kubepods/pod/x\n")
    v2(root, "", str(2 * GIB), GIB)
    assert read_host_memory(root) == HostMemory(2 * GIB, GIB)


def test_damaged_files_are_passed_over(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/a\n")
    group = v2(root, "a", "nonsense", 1)
    assert read_host_memory(root).limit == 8 * GIB
    (group / "memory.max").write_text(str(GIB))
    (group / "memory.stat").write_text("half a li")
    assert read_host_memory(root) == HostMemory(GIB, 1)
