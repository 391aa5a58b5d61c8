"""Free host memory: the kernel's estimate, and a container's limit; and the preparation that measures a step."""

from pathlib import Path

import pytest

from twinkle.model import Trainer
from twinkle.model.trainer.memory import _available_host_bytes
from twinkle.utils.progress import Progress

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


def test_the_parts_of_the_preparation_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take long on a slow machine, after the bar of the weights has reached its end."""
    reported: list[tuple[str, str]] = []

    class Recorded(Progress):
        def doing(self, now: str) -> None:
            reported.append((self._what, now))

    monkeypatch.setattr("twinkle.model.trainer.trainer.Progress", Recorded)
    Trainer.from_pretrained("random://llama-tiny", device="cpu", dtype="fp32")
    assert {what for what, _ in reported} == {"preparing random://llama-tiny"}
    assert [now for _, now in reported] == [
        "one pass with Transformers' own layers, to compare ours with",
        "the same pass with our layers",
        "measuring the memory of a training step",
    ]
