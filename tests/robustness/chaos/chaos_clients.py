"""Clients that train while a server is killed, what they observed, and how it is compared with a quiet server's."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from tests.support.servers.running import Server

DEPTH = 4  # number of steps that a client submits before it waits for the first
SAMPLE_EVERY, SAVE_EVERY = 5, 8  # in steps
LEAST_STEPS = 20  # steps of the client that starts late
TOLERANCE = 1e-5


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

    def __init__(
        self,
        server: Server,
        model: str,
        number: int,
        stop: threading.Event,
        steps: int | None = None,
        *,
        full: bool = False,
        samples: bool = True,
    ) -> None:
        """``full``: train all parameters of the model. ``samples``: the server has a sampler, which is used."""
        super().__init__(name=f"client {number}", daemon=True)
        self.server = server
        self.model = model
        self.full = full
        self.samples = samples
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
        if self.full:
            training = service.create_full_training_client(self.model)
        else:
            training = service.create_lora_training_client(base_model=self.model, rank=8, seed=self.number)
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
            if self.samples and step % SAMPLE_EVERY == 0:
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


def runs_suspect(server: Server) -> bool:
    """Return whether an op runs during which the last process died. A second death would be taken for its fault."""
    for lines in _running_ops(server):
        suspects = {words[1] for words in lines if words[:1] == ["d"] and len(words) == 3}
        running = {words[1]: words[2:] for words in lines if words[:1] == ["+"]}
        ended = {words[1] for words in lines if words[:1] in (["-"], ["~"]) and len(words) == 2}
        if any(suspects.intersection(ids) for number, ids in running.items() if number not in ended):
            return True
    return False


def has_suspects(server: Server) -> bool:
    """Return whether there are ops during which the last process died and which have not run since."""
    for lines in _running_ops(server):
        suspects = {words[1] for words in lines if words[:1] == ["d"] and len(words) == 3}
        running = {words[1]: words[2:] for words in lines if words[:1] == ["+"]}
        ended = {words[1] for words in lines if words[:1] == ["-"] and len(words) == 2}
        if suspects - {each for number in ended for each in running.get(number, ())}:
            return True
    return False


def _running_ops(server: Server) -> list[list[list[str]]]:
    """Return the words of each line of each file that says which ops run (see twinkle.server.services.running_ops)."""
    files = (server.data_dir / "running").glob("*")
    return [[line.split() for line in path.read_text().splitlines()] for path in files if path.suffix != ".new"]


def have_gone_on(clients: list[Client], before: list[int]) -> bool:
    check(clients)
    return all(map(int.__gt__, steps_of(clients), before))


def steps_of(clients: list[Client]) -> list[int]:
    return [len(client.report.losses) for client in clients]


def wait_until(condition: Callable[[], bool], server: Server, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert server.process is not None
        assert server.process.poll() is None, server.log()
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)


@dataclass
class Finished:
    """What is left of clients that have ended: their reports, final weights, and the number of steps in these."""

    reports: list[Report]
    weights: list[dict[str, np.ndarray]]
    steps: list[int]


def finished(server: Server, clients: list[Client]) -> Finished:
    """Wait until all clients have ended. An error of one fails the test."""
    given = reports(clients)
    paths = [report.final for report in given]
    return Finished(given, [weights_of(server, path) for path in paths], [step_count(server, path) for path in paths])


def compare(disturbed: Finished, undisturbed: Finished) -> None:
    """Check that each step was applied once, and that losses, weights, checkpoints and samples are the same."""
    assert disturbed.steps == [len(report.losses) for report in disturbed.reports], "each optim_step is applied once"
    worst = max(compare_weights(a, b) for a, b in zip(disturbed.weights, undisturbed.weights, strict=True))
    for one, other in zip(disturbed.reports, undisturbed.reports, strict=True):
        np.testing.assert_allclose(one.losses, other.losses, rtol=TOLERANCE, atol=TOLERANCE)
        assert one.checkpoints == other.checkpoints
        for samples in (one.samples, one.samples_again):
            compare_samples(samples, other.samples)
    print(f"  weights differ by {worst:.1e} at most, relative to an undisturbed run")
    assert worst <= TOLERANCE


def weights_of(server: Server, path: str) -> dict[str, np.ndarray]:
    directory = directory_of(server, path)
    if (directory / "adapter.npz").exists():  # of the mock
        return {"w": np.load(directory / "adapter.npz")["weights"]}
    from safetensors.numpy import load_file

    adapter = directory / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else directory / "model.safetensors")


def step_count(server: Server, path: str) -> int:
    directory = directory_of(server, path)
    mock, real = directory / "state.json", directory / "trainer_state.json"
    return int(json.loads((mock if mock.exists() else real).read_text())["step"])


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
