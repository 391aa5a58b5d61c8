"""Many concurrent tenants: workers run one life after another until they are stopped, and check each."""

import itertools
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.robustness.soak.soak_tenants import Heartbeats, Lasting, Life, Report, key_of
from tests.support.paths import ROOT
from tests.support.servers.running import environment

CLIENT = Path(__file__).with_name("soak_client.py")
DIED_TWICE = "the server died twice while running it"  # the error of a request that was running at two kills
HOWS = ("raw", "sdk", "native")
KEPT = 3  # how many finished lives of each client type keep their weights for comparison
Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Trained:
    """A finished training run, and its weights as the server saved them."""

    report: Report
    weights: Weights


class Crowd:
    """``raw`` threads that speak HTTP, and ``processes`` that run real clients, some of which are killed."""

    def __init__(self, url: str, data_dir: Path, *, raw: int, processes: int, seed: int) -> None:
        self.url = url
        self.data_dir = data_dir
        self.lives: Counter[str] = Counter()
        self.requests = 0
        self.steps = 0
        self.trained: list[Trained] = []
        self.errors: list[BaseException] = []
        self.beats = Heartbeats(url)
        self._killed: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._numbers = itertools.count(seed)
        self._workers = [self._worker(self._live_raw, f"raw {n}") for n in range(raw)]
        self._workers += [self._worker(self._live_in_process, f"client {n}") for n in range(processes)]

    def start(self) -> None:
        self.beats.start()
        for worker in self._workers:
            worker.start()

    def finish(self) -> None:
        """Let every worker finish its current life."""
        self._stop.set()
        for worker in self._workers:
            worker.join()
        for key in self._killed:  # a killed client could not delete its last checkpoints
            self._delete_checkpoints(key)
        self.beats.end()

    def _worker(self, live: Callable[[int], None], name: str) -> threading.Thread:
        def work() -> None:
            while not self._stop.is_set():
                with self._lock:
                    number = next(self._numbers)
                try:
                    live(number)
                except BaseException as error:  # noqa: BLE001 - raised by the test
                    if DIED_TWICE in str(error):  # two kills met the same request, which then failed
                        self._given_up(number)
                        continue
                    error.add_note(f"in life {number} of {name}")
                    self.errors.append(error)
                    self._stop.set()

        return threading.Thread(target=work, name=name, daemon=True)

    def _live_raw(self, number: int) -> None:
        self._take(Life(number, self.url, self.beats).run())

    def _live_in_process(self, number: int) -> None:
        chance = random.Random(number)
        how = "sdk" if number % 2 else "native"
        process = start_client(how, number, self.url)
        patience = chance.uniform(3, 20) if chance.random() < 0.25 else 600.0
        try:
            said, complaint = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()  # simulates the death of a client
            process.communicate()
            assert patience < 600, f"the {how} client {number} did not come to an end"
            self._killed.append(key_of(how, number))
            self._take(Report(number, how, f"{how}, killed"))
            return
        assert process.returncode == 0, complaint
        self._take(report_of(said))

    def _given_up(self, number: int) -> None:
        """Count a life that ended because the server was killed twice while it ran one of the life's requests."""
        with self._lock:
            self.lives["a request given up after two kills"] += 1
            self._killed += [key_of(how, number) for how in HOWS]

    def _take(self, report: Report) -> None:
        """Compare the acknowledged steps with the checkpoint on disk, then delete the checkpoint as its tenant."""
        weights: Weights | None = None
        if report.final is not None:
            directory = directory_of(self.data_dir, report.final)
            assert step_count(directory) == report.steps, f"{report}: {step_count(directory)} steps are saved"
            if sum(one.report.how == report.how for one in self.trained) < KEPT:
                weights = load_file(directory / "adapter_model.safetensors")
            self._delete_checkpoints(key_of(report.how, report.number))
        with self._lock:
            self.lives[report.kind] += 1
            self.requests += report.requests
            self.steps += report.steps
            if weights is not None:
                self.trained.append(Trained(report, weights))

    def _delete_checkpoints(self, key: str) -> None:
        tenant = Lasting(self.url, key)
        tenant.delete_checkpoints()
        tenant.http.close()


def start_client(how: str, number: int, url: str) -> subprocess.Popen[str]:
    source = str(ROOT / "src")
    variables = {**environment(), "TINKER_TELEMETRY": "0", "PYTHONPATH": source, "TINKER_API_KEY": "tml-unused"}
    command = [sys.executable, str(CLIENT), how, str(number), url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def report_of(said: str) -> Report:
    found = json.loads(said.strip().splitlines()[-1])
    return Report(found["number"], found["kind"], found["kind"], 0, found["steps"], found["final"])


def directory_of(data_dir: Path, address: str) -> Path:
    run, kind, name = address.partition("://")[2].split("/")
    (directory,) = (data_dir / "checkpoints" / run.replace(":", "-") / kind / name).glob("[0-9]*")
    return directory


def step_count(directory: Path) -> int:
    return int(json.loads((directory / "trainer_state.json").read_text())["step"])


def distance(given: Weights, expected: Weights) -> float:
    """Return the largest relative distance between two tensors."""
    assert given.keys() == expected.keys()
    norms = {name: float(np.linalg.norm(expected[name])) for name in expected}
    assert min(norms.values()) > 0, "all of them were trained"
    return max(float(np.linalg.norm(given[name] - expected[name])) / norms[name] for name in expected)
