"""A server whose model is a group of processes, and what disturbs it: kills, a rank that hangs, one that differs."""

import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.on_ray.ray_processes import descendants
from tests.robustness.chaos.chaos_clients import (
    Client,
    compare,
    finished,
    has_suspects,
    have_gone_on,
    runs_suspect,
    steps_of,
    wait_until,
)
from tests.support.servers.running import Server

Target = Literal["rank", "replica", "gateway"]
DIFFERS = signal.SIGUSR1  # a rank that gets it answers once with another fingerprint
TITLES: Mapping[Target, str] = {
    "rank": "ray::TrainerRank",
    "replica": "ServeReplica:model:model-0",
    "gateway": "ServeReplica:server:Gateway",
}
_CLIENTS = 3
_SECONDS = 900.0  # for a group to come back: this fails a test that hangs, and measures nothing
_SUSPECT_SECONDS = 30.0


@dataclass(frozen=True)
class Group:
    """The model of a server, and the processes and timeouts of its group."""

    args: Mapping[str, Any]

    def server(self, directory: Path) -> Server:
        directory.mkdir()
        light = [{"ray_actor_options": {"num_cpus": 0}}]
        applications = [
            {"name": "server", "import_path": "server", "deployments": light},
            {"name": "model", "import_path": "model", "args": dict(self.args), "deployments": light},
        ]
        config = {"runtime": "ray", "applications": applications}
        return Server(directory, config, snapshot=1.0, rank_differs=float(DIFFERS))

    def client(self, server: Server, number: int, stop: threading.Event, steps: int | None = None) -> Client:
        return Client(server, self.args["model_id"], number, stop, steps, samples=False)


@dataclass(frozen=True)
class Disturbance:
    """A signal for a random process of one kind. ``working``: it comes while all clients get results."""

    target: Target
    signal: signal.Signals
    working: bool = True

    @property
    def ends_group(self) -> bool:
        return self.target != "gateway"

    def __str__(self) -> str:
        moment = "while clients work" if self.working else "at any moment"
        return f"{self.signal.name} for the {self.target} {moment}"


def drawn(chance: random.Random, kills: int) -> list[Disturbance]:
    """Draw kills of ranks, the replica and the gateway, each at least once, a rank that hangs and one that differs."""
    targets: list[Target] = ["rank", "replica", "gateway"]
    chosen = [*targets, *chance.choices(targets, [3, 1, 1], k=kills)][:kills]
    each = [Disturbance(target, signal.SIGKILL, working=chance.random() < 0.7) for target in chosen]
    each += [Disturbance("rank", signal.SIGSTOP), Disturbance("rank", DIFFERS)]
    chance.shuffle(each)
    return each


def disturb(
    server: Server, chance: random.Random, clients: Sequence[Client], disturbances: Sequence[Disturbance]
) -> None:
    """Send each signal, and wait until the group is gone; but never let a group die twice during one op."""
    for number, one in enumerate(disturbances, 1):
        if one.working:
            # A step must have been measured three times after the group came back: before, the clock is slow.
            for _ in range(3):
                before = steps_of(clients)
                wait_until(lambda before=before: have_gone_on(clients, before), server, _SECONDS)
        wait_until(lambda one=one: bool(descendants(server, TITLES[one.target])), server, _SECONDS)
        time.sleep(chance.uniform(0.0, 1.0))
        wait_for_suspects(server)
        found = descendants(server, TITLES[one.target])
        while not found:  # it has just ended because of the last kill
            found = descendants(server, TITLES[one.target])
        chosen, ranks = chance.choice(found), descendants(server, TITLES["rank"])
        print(f"  {number:2} of {len(disturbances)}: {one}, after steps {steps_of(clients)}", flush=True)
        os.kill(chosen, one.signal)
        gone = {chosen, *ranks} if one.ends_group else {chosen}
        wait_until(lambda gone=gone: not gone & set(every_process(server)), server, _SECONDS)
    before = steps_of(clients)
    wait_until(lambda: have_gone_on(clients, before), server, _SECONDS)


def wait_for_suspects(server: Server) -> None:
    """Wait until the ops during which the last group died have ended: a second death would be taken for their fault."""
    deadline = time.monotonic() + _SUSPECT_SECONDS
    while has_suspects(server) and time.monotonic() < deadline:
        time.sleep(0.05)  # ops that have ended before may still be in the file, so this may take all the time
    while runs_suspect(server):
        time.sleep(0.002)


def stopped(server: Server) -> int:
    """Stop the server, and return its exit code."""
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(_SECONDS)


def every_process(server: Server) -> list[int]:
    return [pid for title in TITLES.values() for pid in descendants(server, title)]


def run_chaos(group: Group, directory: Path, kills: int, seed: int) -> str:
    """Disturb a server under clients, compare all with an undisturbed one, and return the disturbed server's log."""
    chance = random.Random(seed)
    disturbances = drawn(chance, kills)
    server, stop = group.server(directory / "disturbed").spawn(), threading.Event()
    clients = [group.client(server, number, stop) for number in range(_CLIENTS)]
    started = time.monotonic()
    try:
        wait_until(server.is_healthy, server, _SECONDS)
        for client in clients:
            client.start()
        disturb(server, chance, clients, disturbances)
        stop.set()
        disturbed = finished(server, clients)
        assert stopped(server) == 0
    finally:
        stop.set()
        server.close()
    print(f"  {disturbed.steps} steps in {time.monotonic() - started:.0f} s", flush=True)

    quiet = group.server(directory / "undisturbed").spawn()
    try:
        wait_until(quiet.is_healthy, quiet, _SECONDS)
        again = [group.client(quiet, number, stop, steps) for number, steps in enumerate(steps_of(clients))]
        for client in again:
            client.start()
        undisturbed = finished(quiet, again)
    finally:
        quiet.close()
    compare(disturbed, undisturbed)
    return server.log()
