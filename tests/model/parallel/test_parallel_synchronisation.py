"""``sync_weights`` with FSDP2 on two processes: each process has shards of the model, and a sampler of its own."""

import pytest

from tests.model.parallel.process_pool import ProcessPool
from tests.model.parallel.sync_programs import (
    STEPS,
    differences,
    fails_in_one_process,
    rise,
    sampler_on_shards,
)
from tests.support.models import peak_memory

pytestmark = pytest.mark.parallel

CASES = {
    "full": ("full", True),
    "adapter": ("PEFT", False),
    "merged": ("PEFT", True),
    "multi-LoRA adapter": ("multi-LoRA", False),
    "multi-LoRA merged": ("multi-LoRA", True),
}
OF_THE_MODEL = ("full", "adapter", "merged")


@pytest.mark.parametrize(
    ("case", "beside"), [*((case, False) for case in CASES), *((case, True) for case in OF_THE_MODEL)]
)
def test_the_sampler_draws_with_the_trained_weights(two: ProcessPool, case: str, beside: bool) -> None:
    for found in two.run(differences, *CASES[case], beside):
        assert len(found) == STEPS
        assert max(found) < 1e-5


def test_a_sampler_does_not_run_on_the_shards_of_a_multi_lora_model(two: ProcessPool) -> None:
    for told in two.run(sampler_on_shards):
        assert "allowed: LocalSampler(model_id)" in told


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("method", "calls"), [("prepare_weights", 0), ("receive_bucket", 3), ("finish_weights", 0)])
def test_a_failure_in_one_process_is_one_in_all(two: ProcessPool, method: str, calls: int, rank: int) -> None:
    results = two.run(fails_in_one_process, method, rank, calls)
    for own, (told, refused, after) in enumerate(results):
        assert "ConnectionError: cut" in told
        assert own == rank or f"process {rank} failed" in told
        assert refused == (method != "prepare_weights")
        assert after < 1e-5


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    return peak_memory.save_100_mib(tmp_path_factory.mktemp("large"))


@pytest.mark.parametrize("merge", [False, True])
def test_memory_rises_by_at_most_two_buckets(two: ProcessPool, merge: bool, large: str) -> None:
    assert max(two.run(rise, large, merge)) <= 2 * peak_memory.BUCKET_MB
