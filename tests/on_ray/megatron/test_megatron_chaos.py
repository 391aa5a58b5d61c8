"""A group of four processes (TP2 × PP2) is disturbed again and again, and trains as if nothing had happened.

Three clients of the real SDK train while random ranks, the replica and the gateway are killed ten times, while one rank
is stopped, and while one answers something else than the others. Then the same number of steps runs on a server that
nobody disturbs, and all results are compared, as in tests/robustness/chaos.

``CHAOS_KILLS`` and ``CHAOS_SEED`` set the number of kills and the seed.
"""

import os
import time
from pathlib import Path

import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-megatron` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

from tests.on_ray.megatron.group_chaos import Group, run_chaos
from tests.support.servers.running import environment
from twinkle_client import init_tinker_client

KILLS = int(os.environ.get("CHAOS_KILLS") or 10)
SEED = int(os.environ.get("CHAOS_SEED") or time.time())
CPU = {"name": "model", "device_type": "cpu"}
MEGATRON = {
    "model_id": "random://llama-tiny",
    "backend": "megatron",
    "dtype": "fp32",
    "device_group": {**CPU, "ranks": 4},
    "device_mesh": {"tp_size": 2, "pp_size": 2},
    "group_timeout_seconds": 30.0,
}
TRANSFORMERS = {
    **MEGATRON,
    "backend": "transformers",
    "device_group": {**CPU, "ranks": 2},
    "device_mesh": {"dp_size": 2},
}

pytestmark = pytest.mark.megatron


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", environment()["NO_PROXY"])
    monkeypatch.setenv("no_proxy", environment()["no_proxy"])
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def test_a_group_of_four_processes_survives_chaos(tmp_path: Path) -> None:
    args = TRANSFORMERS if os.environ.get("CHAOS_BACKEND") == "transformers" else MEGATRON
    print(f"\n{KILLS} kills of a group of {args['backend']}, seed {SEED}")
    init_tinker_client()
    log = run_chaos(Group(args), tmp_path, KILLS, SEED)
    assert "s, so a rank hangs: " in log
    assert "differently from rank" in log
