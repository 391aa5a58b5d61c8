"""Write a data directory for test_older_data.py, which opens it with later versions of the server.

    python -m tests.support.servers.stored_data tests/support/servers/data/schema_9.tar.gz

Two tenants use a server with the mock model, one through each protocol. The server is killed while ops wait. The
archive holds the data directory and ``expected.json``: keys, ids, and the numbers that a second server, which was never
killed, computed for the same requests.
"""

import contextlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import MODEL, Server, Tenant, datum, environment, mock_config

TEN_YEARS = 10 * 365.0 * 86_400
# The directory is opened long after it was written. Nothing in it may have expired by then.
KEPT = {
    "limits": {
        "parked_adapter_seconds": TEN_YEARS,
        "result_retention_seconds": TEN_YEARS,
        "unfetched_result_seconds": TEN_YEARS,
        "sampler_version_retention_seconds": TEN_YEARS,
        "ended_session_retention_seconds": TEN_YEARS,
        "audit_retention_seconds": TEN_YEARS,
    }
}
CONFIG = mock_config(auth={"mode": "keys"}, **KEPT)


@dataclass
class Expected:
    """The ids and numbers that the archive's test compares with."""

    keys: dict[str, str] = field(default_factory=dict)  # API keys by tenant
    model_id: str = ""  # Alice's adapter
    answered: str = ""  # a request id whose result was never fetched
    answered_loss: float = 0.0
    waiting: dict[str, float] = field(default_factory=dict)  # request ids that had no result yet, with their losses
    checkpoint: str = ""
    loss_after: float = 0.0  # loss of one more pass, after all waiting ops
    loss_of_checkpoint: float = 0.0  # loss of a pass after loading the checkpoint
    evicted_model_id: str = ""
    evicted_checkpoint: str = ""
    loss_of_evicted: float = 0.0
    sampling_session_id: str = ""
    tokens: list[int] = field(default_factory=list)
    native_session_id: str = ""
    native_losses: dict[str, float] = field(default_factory=dict)  # losses of the requests from number 20 on, by number
    native_state: dict[str, list[float]] = field(default_factory=dict)  # result of get_state_dict after all of them


def data(number: int) -> list[Any]:
    """Return the datums of one request. They differ from number to number."""
    numbers = np.random.default_rng(number)
    return [datum(numbers.integers(1, 60, 8).tolist())]


def rows(number: int) -> list[dict[str, list[int]]]:
    tokens = np.random.default_rng(number).integers(1, 60, 6).tolist()
    return [{"input_ids": tokens, "labels": tokens}]


def write_key(server: Server, name: str) -> str:
    """Create an API key with the server's own command."""
    command = server.command("keys", "create", "--name", name, "-c", str(server.directory / "config.yaml"))
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stdout.split()[-1]


# --- the requests that both servers get -------------------------------------------------------------------------------


def train(alice: Tenant) -> tuple[str, str, str]:
    """Train three steps, save a checkpoint, publish weights, train one more step.

    Return (model, checkpoint, sampling session).
    """
    model = alice.model(seed=3)
    for step in range(3):
        alice.result(alice.forward_backward(model, 2 * step + 1, data(step)))
        alice.result(alice.optim_step(model, 2 * step + 2))
    checkpoint = alice.json(alice.save(model, 7, "kept"))["path"]
    sampling = alice.json(alice.publish(model, 8))["sampling_session_id"]
    alice.result(alice.forward_backward(model, 9, data(9)))
    alice.result(alice.optim_step(model, 10))
    return model, checkpoint, sampling


def evict(alice: Tenant) -> tuple[str, str]:
    """Train an adapter and end its session. Return (model, the checkpoint that the adapter became)."""
    session = alice.session()
    model = alice.model(session, seed=5)
    alice.result(alice.forward_backward(model, 1, data(31)))
    alice.result(alice.optim_step(model, 2))
    assert alice.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}).status_code == 200
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        listed = alice.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
        if listed:
            return model, listed[0]["tinker_path"]
        time.sleep(0.05)
    raise AssertionError("the adapter of a session that ended was not kept")


def submit_waiting(alice: Tenant, model: str) -> list[str]:
    """Submit two more steps without waiting for them; return the request ids of the passes."""
    passes = []
    for step in range(2):
        passes.append(alice.forward_backward(model, 2 * step + 12, data(step + 40)))
        alice.optim_step(model, 2 * step + 13)
    return passes


def set_up_native(bob: NativeTenant) -> None:
    bob.add_adapter("a", seed=1, gradient_accumulation_steps=2)
    bob.verb("set_optimizer", adapter_name="a", optimizer_cls="AdamW", lr=0.05, seq_id=1)
    bob.verb("set_lr_scheduler", adapter_name="a", scheduler_cls="LinearLR", start_factor=0.5, total_iters=6, seq_id=2)
    for step in range(4):
        bob.verb("forward_backward", adapter_name="a", inputs=rows(step), seq_id=2 * step + 3)
        bob.verb("clip_grad_and_step", adapter_name="a", seq_id=2 * step + 4)
    bob.verb("save", adapter_name="a", name="kept", save_optimizer=True, seq_id=11)


NATIVE_LAST: dict[int, tuple[str, dict[str, Any]]] = {
    12: ("forward_backward", {"inputs": rows(50)}),
    13: ("clip_grad_and_step", {}),
    14: ("forward_backward", {"inputs": rows(51)}),
    15: ("clip_grad_and_step", {}),
}


def ask_native(bob: NativeTenant, number: int) -> float | None:
    """Send one of the last requests, possibly for the second time; return its loss if it has one."""
    verb, fields = NATIVE_LAST[number]
    result = bob.verb(verb, adapter_name="a", seq_id=number, **fields)
    return float(result["loss"]) if verb == "forward_backward" else None


def native_state(bob: NativeTenant, number: int) -> dict[str, list[float]]:
    tensors = bob.verb("get_state_dict", adapter_name="a", seq_id=number)
    return {name: np.asarray(values, np.float64).ravel()[:8].tolist() for name, values in tensors.items()}


# --- writing ----------------------------------------------------------------------------------------------------------


def compute_expected(directory: Path, expected: Expected) -> None:
    """Fill in the numbers, computed by a server that is never killed."""
    server = Server(directory, CONFIG).start()
    alice = Tenant(server.url, write_key(server, "alice"))
    bob = NativeTenant(server.url, write_key(server, "bob"), MODEL)
    model, checkpoint, sampling = train(alice)
    _, evicted = evict(alice)
    expected.answered_loss = alice.loss(alice.forward_backward(model, 11, data(11)))
    losses = [alice.loss(request_id) for request_id in submit_waiting(alice, model)]
    expected.waiting = dict(zip(("first", "second"), losses, strict=True))
    expected.loss_after = alice.loss(alice.forward_backward(model, 16, data(60)))
    expected.tokens = alice.tokens(alice.sample(sampling))
    alice.result(alice.load(model, 17, checkpoint))
    expected.loss_of_checkpoint = alice.loss(alice.forward_backward(model, 18, data(61)))
    alice.result(alice.load(model, 19, evicted))
    expected.loss_of_evicted = alice.loss(alice.forward_backward(model, 20, data(62)))
    set_up_native(bob)
    for number in NATIVE_LAST:
        loss = ask_native(bob, number)
        if loss is not None:
            expected.native_losses[str(number)] = loss
    expected.native_state = native_state(bob, 16)
    server.stop()


def write_data(directory: Path, expected: Expected) -> Path:
    """Fill a data directory, kill its server while ops wait, and return the directory."""
    server = Server(directory, CONFIG, snapshot=0.2).start()
    expected.keys = {name: write_key(server, name) for name in ("alice", "bob")}
    alice = Tenant(server.url, expected.keys["alice"])
    expected.model_id, expected.checkpoint, expected.sampling_session_id = train(alice)
    expected.evicted_model_id, expected.evicted_checkpoint = evict(alice)
    bob = NativeTenant(server.url, expected.keys["bob"], MODEL)
    expected.native_session_id = bob.session_id
    set_up_native(bob)
    time.sleep(1)  # time for a snapshot of both adapters
    server.stop()

    server.tuning = {"pass": 5.0, "snapshot": 3600.0}
    server.start()
    alice, http = Tenant(server.url, expected.keys["alice"]), bob.http
    bob.http = httpx.Client(base_url=server.url, headers=http.headers, timeout=120, trust_env=False)
    expected.answered = alice.forward_backward(expected.model_id, 11, data(11))
    alice.poll(expected.answered)  # long poll; the test does not depend on whether the result came in time
    waiting = submit_waiting(alice, expected.model_id)
    expected.waiting = dict(zip(waiting, expected.waiting.values(), strict=True))

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            ask_native(bob, 12)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1)
    server.kill()
    asking.join()
    return server.data_dir


def main(archive: Path) -> None:
    expected = Expected()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("quiet", "killed"):
            (Path(folder) / name).mkdir()
        compute_expected(Path(folder) / "quiet", expected)
        directory = write_data(Path(folder) / "killed", expected)
        text = json.dumps(asdict(expected), indent=1).encode()
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(
                directory, "data", filter=lambda member: None if member.name.endswith(("reserve", ".log")) else member
            )
            member = tarfile.TarInfo("expected.json")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
