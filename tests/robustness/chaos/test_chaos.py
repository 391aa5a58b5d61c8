"""SIGKILL at random moments while clients pipeline requests: no client sees an error, nothing is lost or done twice.

Three clients of the real SDK train, save and sample while the server is killed and restarted twenty times. They
continue until the last kill. Then the same number of steps runs on a server that is never killed, and all results are
compared. The same with one client that trains all parameters of the model (``train_mode: full``), whose snapshots and
versions are complete sets of weights.

``CHAOS_BACKEND=mock`` replaces the model by the mock; ``CHAOS_KILLS`` and ``CHAOS_SEED`` set the number of kills and
the seed.
"""

import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.servers.running import Server, environment, mock_config
from twinkle_client import init_tinker_client

MOCK = os.environ.get("CHAOS_BACKEND") == "mock"
KILLS = int(os.environ.get("CHAOS_KILLS") or 20)
SEED = int(os.environ.get("CHAOS_SEED") or time.time())
MODEL = "mock" if MOCK else "random://llama-tiny"
CLIENTS = {"lora": 3, "full": 1}  # by train_mode
REPLAYED = 8  # max_replayed_steps: few, so that runs wait for snapshots, too
DEPTH = 4  # number of steps that a client submits before it waits for the first
SAMPLE_EVERY, SAVE_EVERY = 5, 8  # in steps
LEAST_STEPS = 20  # steps of the client that starts late
TOLERANCE = 1e-5

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


@dataclass
class Report:
    """What a client observed."""

    losses: list[float] = field(default_factory=list)
    # by the step after which they were published
    samples: dict[int, types.SampleResponse] = field(default_factory=dict)
    samples_again: dict[int, types.SampleResponse] = field(default_factory=dict)  # drawn by the same clients at the end
    checkpoints: list[str] = field(default_factory=list)
    final: str = ""
    longest_wait: float = 0.0


class Client(threading.Thread):
    """One tenant. Trains ``steps`` steps, or until it is stopped."""

    def __init__(self, server: Server, mode: str, number: int, stop: threading.Event, steps: int | None = None) -> None:
        super().__init__(name=f"client {number}")
        self.server = server
        self.mode = mode
        self.number = number
        self.key = f"tml-chaos-{number}"
        self.stop = stop
        self.steps = steps
        self.report = Report()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001 - reported by the test
            self.error = error

    def _train(self) -> None:
        service = tinker.ServiceClient(base_url=self.server.url, api_key=self.key)
        if self.mode == "full":
            training = service.create_full_training_client(MODEL)
        else:
            training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=self.number)
        under_way: deque[tuple[Future, Future]] = deque()
        samplers: dict[int, tinker.SamplingClient] = {}
        step = 0
        while not self._is_over(step):
            adam = types.AdamParams(learning_rate=1e-3, eps=1e-8)
            under_way.append((training.forward_backward(self._rows(step), "cross_entropy"), training.optim_step(adam)))
            step += 1
            if step % SAVE_EVERY == 0:
                training.save_state(f"step{step}").result()
                self.report.checkpoints.append(f"weights/step{step}")
            if step % SAMPLE_EVERY == 0:
                samplers[step] = training.save_weights_and_get_sampling_client()
                self.report.samples[step] = self._sample(samplers[step])
            while len(under_way) > DEPTH:
                self._collect(*under_way.popleft())
        while under_way:
            self._collect(*under_way.popleft())
        self.report.samples_again = {at: self._sample(sampler) for at, sampler in samplers.items()}
        self.report.final = training.save_state("final").result().path
        self.report.checkpoints.append("weights/final")
        rest = tinker.RestClient(base_url=self.server.url, api_key=self.key)
        listed = rest.list_user_checkpoints(limit=1000).result().checkpoints
        assert sorted(one.checkpoint_id for one in listed) == sorted(self.report.checkpoints)

    def _is_over(self, step: int) -> bool:
        if self.steps is not None:
            return step == self.steps
        return self.stop.is_set() and step >= LEAST_STEPS

    def _rows(self, step: int) -> list[types.Datum]:
        generator = np.random.default_rng([self.number, step])
        rows = [generator.integers(1, 200, generator.integers(8, 24)) for _ in range(2)]
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1].tolist()),
                loss_fn_inputs={"target_tokens": row[1:].tolist(), "weights": [1.0] * (len(row) - 1)},
            )
            for row in rows
        ]

    def _collect(self, passed: Future, stepped: Future) -> None:
        started = time.monotonic()
        self.report.losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
        self.report.longest_wait = max(self.report.longest_wait, time.monotonic() - started)

    def _sample(self, sampler: tinker.SamplingClient) -> types.SampleResponse:
        params = types.SamplingParams(max_tokens=8, seed=self.number, temperature=1.0, stop=[])
        return sampler.sample(types.ModelInput.from_ints([5, 6, 7]), num_samples=2, sampling_params=params).result()


def reports(clients: list[Client]) -> list[Report]:
    for client in clients:
        client.join()
    check(clients)
    return [client.report for client in clients]


def check(clients: list[Client]) -> None:
    for client in clients:
        if client.error is not None:
            raise AssertionError(f"{client.name} saw an error") from client.error


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


def runs_suspect(server: Server) -> bool:
    """Return whether an op runs during which the last process died. A second death would be taken for its fault."""
    for path in (server.data_dir / "running").glob("*"):
        words = [line.split() for line in path.read_text().splitlines()]
        suspects = {line[1] for line in words if line[:1] == ["d"] and len(line) == 3}
        running = {line[1]: line[2:] for line in words if line[:1] == ["+"]}
        ended = {line[1] for line in words if line[:1] in (["-"], ["~"]) and len(line) == 2}
        if any(suspects.intersection(ids) for number, ids in running.items() if number not in ended):
            return True
    return False


def have_gone_on(clients: list[Client], before: list[int]) -> bool:
    check(clients)
    return all(map(int.__gt__, steps_of(clients), before))


def steps_of(clients: list[Client]) -> list[int]:
    return [len(client.report.losses) for client in clients]


def wait_until(condition: Callable[[], bool], server: Server) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert server.process is not None
        assert server.process.poll() is None, server.log()
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)


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
    stop = threading.Event()
    clients = [Client(server, mode, number, stop) for number in range(CLIENTS[mode])]
    started = time.monotonic()
    try:
        for client in clients[:-1]:
            client.start()
        late = threading.Timer(2.0, clients[-1].start)  # this client starts in the middle of the work
        late.start()
        kill_repeatedly(server, chance, clients)
        late.join()
        stop.set()
        disturbed = reports(clients)
        weights = [weights_of(server, report.final) for report in disturbed]
        steps = [step_count(server, report.final) for report in disturbed]
        assert server.stop() == 0
    finally:
        stop.set()
        server.close()
    print(f"  {[len(report.losses) for report in disturbed]} steps in {time.monotonic() - started:.0f} s")

    quiet = server_in(tmp_path / "undisturbed", mode).start()
    try:
        again = [Client(quiet, mode, n, threading.Event(), len(report.losses)) for n, report in enumerate(disturbed)]
        for client in again:
            client.start()
        undisturbed = reports(again)
        expected = [weights_of(quiet, report.final) for report in undisturbed]
    finally:
        quiet.close()

    assert steps == [len(report.losses) for report in disturbed], "each optim_step is applied once"
    worst = max(compare_weights(a, b) for a, b in zip(weights, expected, strict=True))
    for one, other in zip(disturbed, undisturbed, strict=True):
        np.testing.assert_allclose(one.losses, other.losses, rtol=TOLERANCE, atol=TOLERANCE)
        assert one.checkpoints == other.checkpoints
        for samples in (one.samples, one.samples_again):
            compare_samples(samples, other.samples)
    print(f"  weights differ by {worst:.1e} at most, relative to an undisturbed run")
    assert worst <= TOLERANCE
    assert "Traceback" not in server.log(), server.log()


def weights_of(server: Server, path: str) -> dict[str, np.ndarray]:
    directory = directory_of(server, path)
    if MOCK:
        return {"w": np.load(directory / "adapter.npz")["weights"]}
    from safetensors.numpy import load_file

    adapter = directory / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else directory / "model.safetensors")


def step_count(server: Server, path: str) -> int:
    state = json.loads((directory_of(server, path) / ("state.json" if MOCK else "trainer_state.json")).read_text())
    return int(state["step"])


def directory_of(server: Server, path: str) -> Path:
    run, kind, name = path.removeprefix("tinker://").split("/")
    (directory,) = (server.data_dir / "checkpoints" / run.replace(":", "-") / kind / name).glob("[0-9]*")
    return directory


def compare_weights(given: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest relative distance between two tensors."""
    assert given.keys() == expected.keys()
    norms = {name: float(np.linalg.norm(expected[name])) for name in expected}
    assert min(norms.values()) > 0, "all of them were trained"
    return max(float(np.linalg.norm(given[name] - expected[name])) / norms[name] for name in expected)


def compare_samples(given: dict[int, types.SampleResponse], expected: dict[int, types.SampleResponse]) -> None:
    """Check that every published version samples the same as on the quiet server, even long after its publication."""
    assert given.keys() == expected.keys()
    for step, response in expected.items():
        for one, other in zip(given[step].sequences, response.sequences, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)
