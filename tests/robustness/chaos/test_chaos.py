"""SIGKILL at random moments while clients pipeline requests: no client sees an error, nothing is lost or done twice.

Three clients of the real SDK train, save and sample while the server is killed and restarted twenty times. They
continue until the last kill. Then the same number of steps runs on a server that is never killed, and all results are
compared. The same with one client that trains all parameters of the model (``train_mode: full``), whose snapshots and
versions are complete sets of weights.

``CHAOS_BACKEND=mock`` replaces the model by the mock; ``CHAOS_KILLS`` and ``CHAOS_SEED`` set the number of kills and
the seed.
"""

import os
import random
import threading
import time
from pathlib import Path

import pytest

from tests.robustness.chaos.chaos_clients import (
    Client,
    compare,
    finished,
    have_gone_on,
    runs_suspect,
    steps_of,
    wait_until,
)
from tests.support.servers.running import Server, environment, mock_config
from twinkle_client import init_tinker_client

MOCK = os.environ.get("CHAOS_BACKEND") == "mock"
KILLS = int(os.environ.get("CHAOS_KILLS") or 20)
SEED = int(os.environ.get("CHAOS_SEED") or time.time())
MODEL = "mock" if MOCK else "random://llama-tiny"
CLIENTS = {"lora": 3, "full": 1}  # by train_mode
REPLAYED = 8  # max_replayed_steps: few, so that runs wait for snapshots, too

pytestmark = pytest.mark.chaos


def server_in(directory: Path, mode: str) -> Server:
    directory.mkdir()
    full = {"train_mode": "full", "max_replayed_steps": REPLAYED} if mode == "full" else {}
    if MOCK:
        config = mock_config()
        config["applications"][1]["args"] |= full
        return Server(directory, config, **{"pass": 0.02, "snapshot": 1.0})
    model = {"model_id": MODEL, "backend": "transformers", "device": "cpu", "dtype": "fp32", **full}
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": model},
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": MODEL, "sampler_type": "torch"}},
    ]
    return Server(directory, {"applications": applications}, snapshot=1.0)


def kill_repeatedly(server: Server, chance: random.Random, clients: list[Client]) -> None:
    """Kill the server while it starts, while it replays, and mostly while it works, but never twice during one op."""
    for number in range(1, KILLS + 1):
        moment = chance.choice(["starting", "started", "working", "working"])
        if moment != "starting":
            wait_until(server.is_healthy, server)
        if moment == "working":  # wait for all of them: clients that found no server take a while to return
            before = steps_of(clients)
            wait_until(lambda before=before: have_gone_on(clients, before), server)
        time.sleep(chance.uniform(0.0, 2.0))
        while runs_suspect(server):
            time.sleep(0.002)
        server.kill()
        print(f"  kill {number:2} of {KILLS} ({moment}) after steps {steps_of(clients)}", flush=True)
        server.spawn()
    wait_until(server.is_healthy, server)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", environment()["NO_PROXY"])
    monkeypatch.setenv("no_proxy", environment()["no_proxy"])
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_chaos(mode: str, tmp_path: Path) -> None:
    print(f"\n{KILLS} kills of a server with {MODEL}, train_mode {mode}, seed {SEED}")
    init_tinker_client()
    chance = random.Random(SEED)
    server = server_in(tmp_path / "disturbed", mode).start()
    stop, options = threading.Event(), {"full": mode == "full"}
    clients = [Client(server, MODEL, number, stop, **options) for number in range(CLIENTS[mode])]
    started = time.monotonic()
    try:
        for client in clients[:-1]:
            client.start()
        late = threading.Timer(2.0, clients[-1].start)  # this client starts in the middle of the work
        late.start()
        kill_repeatedly(server, chance, clients)
        late.join()
        stop.set()
        disturbed = finished(server, clients)
        assert server.stop() == 0
    finally:
        stop.set()
        server.close()
    print(f"  {disturbed.steps} steps in {time.monotonic() - started:.0f} s")

    quiet = server_in(tmp_path / "undisturbed", mode).start()
    try:
        again = [
            Client(quiet, MODEL, n, threading.Event(), steps, **options) for n, steps in enumerate(steps_of(clients))
        ]
        for client in again:
            client.start()
        undisturbed = finished(quiet, again)
    finally:
        quiet.close()

    compare(disturbed, undisturbed)
    assert "Traceback" not in server.log(), server.log()
