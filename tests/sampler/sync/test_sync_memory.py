"""How far ``sync_weights`` raises the memory of a process: a model of 100 MiB, a sampler with a copy of it, buckets."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.models.peak_memory import BUCKET_MB, RETURNING_FREED_MEMORY, save_100_mib
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def rises(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = save_100_mib(tmp_path_factory.mktemp("large"))
    command = [sys.executable, "-m", "tests.support.models.sync_memory", folder]
    environment = {**os.environ, **RETURNING_FREED_MEMORY}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("model", ["full", "with_adapter", "multi_lora"])
def test_memory_rises_by_at_most_two_buckets(model: str, rises: dict[str, list[float]]) -> None:
    _, *small, large = rises[model]
    assert min(small) <= 2 * BUCKET_MB, small
    if model != "full":  # weights of a plain model are copied where they are, without a bucket in between
        assert large > 4 * BUCKET_MB, "the measurement sees large buckets"
