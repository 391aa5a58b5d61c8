"""Free host memory: the kernel's estimate, and a container's limit; and the preparation that measures a step."""

from pathlib import Path

import pytest
import torch

from twinkle.model import Trainer
from twinkle.model.trainer.memory import MemoryPlan, _available_host_bytes, divide
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
            reported.append((self.what, now))

    monkeypatch.setattr("twinkle.model.trainer.trainer.Progress", Recorded)
    Trainer.from_pretrained("random://llama-tiny", device="cpu", dtype="fp32")
    assert {what for what, _ in reported} == {"preparing random://llama-tiny"}
    assert [now for _, now in reported] == [
        "one pass with Transformers' own layers, to compare ours with",
        "the same pass with our layers",
        "measuring the memory of a training step",
    ]


GIB = 2**30
MIB = 2**20


def divided(free: int, per_token: int, device: str = "cuda", **options: int | bool) -> MemoryPlan:
    sizes = {"weights": GIB, "free": free, "per_token": per_token, "per_token_recomputed": per_token // 8}
    return divide(**{"max_tokens": None} | sizes | options, device=torch.device(device))


def test_a_small_model_gets_all_the_activations_that_it_can_use() -> None:
    plan = divided(136 * GIB, 1900 * 1024)
    assert plan.tokens == 16384


def test_a_large_model_leaves_room_for_adapters_and_cache() -> None:
    """8B parameters on a GPU with 139 GiB: a cache of 64 GiB must fit beside adapters."""
    plan = divided(124 * GIB, 5632 * 1024)
    assert plan.adapters >= 79 * GIB
    assert plan.tokens >= 4096


def test_tokens_that_were_asked_for_are_given() -> None:
    assert divided(124 * GIB, 5632 * 1024, max_tokens=12000).tokens == 12000


def test_a_trainer_without_adapters_gives_activations_more() -> None:
    assert divided(124 * GIB, 5632 * 1024, others=False).activations == int(int(124 * GIB * 0.92) * 0.6)


def test_a_small_gpu_still_computes_batches_of_useful_size() -> None:
    plan = divided(20 * GIB, 3 * MIB)
    assert plan.activations == int(int(20 * GIB * 0.92) * 0.6)  # less than 4096 tokens need


def test_a_cpu_divides_as_before() -> None:
    plan = divided(8 * GIB, MIB, device="cpu")
    assert plan.activations == min(int(int(8 * GIB * 0.92) * 0.6), 4096 * MIB)
