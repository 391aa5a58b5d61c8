"""Valid but greedy requests next to an honest tenant, under 3 GiB: the server survives, and every refusal says why.

FUZZ_SEED repeats a run's choices (times differ). FUZZ_GREEDY_SECONDS is its duration, ten minutes by default.
"""

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.greedy_client import greedy
from tests.robustness.attack.confined import LIMIT, ConfinedServer
from tests.support.servers.running import Tenant, datum, torch_config

MODEL = "random://llama-tiny"
_LONGEST_STEP = 240.0  # seconds; the slowdown of steps is printed, and benchmarks judge it


@pytest.fixture
def greedy_target(tmp_path: Path) -> Iterator[ConfinedServer]:
    """A server with a tiny model and default limits, under a memory limit."""
    server = ConfinedServer(tmp_path, torch_config(MODEL)).confine(LIMIT)
    server.start()
    yield server
    server.close()


class Honest(threading.Thread):
    """A tenant that trains small steps, one after another, until it is stopped."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.tenant = Tenant(url, "tml-honest")
        self.seconds: list[float] = []
        self.error: BaseException | None = None
        self.stopping = threading.Event()

    def run(self) -> None:
        try:
            session = self.tenant.session()
            model = self._model(session)
            number = 1
            while not self.stopping.is_set():
                self.tenant.post("session_heartbeat", {"session_id": session})
                began = time.monotonic()
                passed = self.tenant.forward_backward(model, number, [datum([n % 90 + 3 for n in range(33)])])
                stepped = self.tenant.optim_step(model, number + 1)
                for request in (passed, stepped):
                    result = self.tenant.result(request, seconds=_LONGEST_STEP)
                    assert not result.startswith(b'{"error"'), result
                self.seconds.append(time.monotonic() - began)
                number += 2
                self.stopping.wait(0.2)
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            self.error = error

    def _model(self, session: str) -> str:
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8, "seed": 1}}
        made = self.tenant.post("create_model", body)
        assert made.status_code == 200, made.text
        return str(self.tenant.json(made.json()["request_id"])["model_id"])


@pytest.mark.fuzz
def test_greedy_requests(greedy_target: ConfinedServer) -> None:
    seed = int(os.environ.get("FUZZ_SEED") or time.time_ns())
    seconds = float(os.environ.get("FUZZ_GREEDY_SECONDS") or 600)
    print(f"\nFUZZ_SEED={seed}")
    honest = Honest(greedy_target.url)
    honest.start()
    tally = asyncio.run(greedy(greedy_target.url, "tml-greedy", MODEL, seed, seconds))
    honest.stopping.set()
    honest.join(300)
    times = sorted(honest.seconds) or [float("nan")]
    median, last = statistics.median(times), times[int(len(times) * 0.99)]
    peak = greedy_target.confinement.peak() / 2**30
    print(f"honest steps: {len(times)}, median {median:.2f} s, p99 {last:.2f} s, longest {times[-1]:.2f} s")
    print(f"memory: peak {peak:.2f} GiB\n{tally}")
    assert greedy_target.confinement.kills() == 0, "the server was killed for memory"
    assert greedy_target.process is not None
    assert greedy_target.process.poll() is None, f"the server ended\n{greedy_target.log()[-4000:]}"
    assert greedy_target.is_healthy()
    assert honest.error is None, honest.error
    assert not honest.is_alive(), "the honest tenant waits for a step"
    assert not tally.unexplained, "\n".join(tally.unexplained[:20])
    assert "Traceback" not in greedy_target.log()
