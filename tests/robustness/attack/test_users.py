"""Ordinary users: scripts that come and go, killed clients, a suspended server, and an endless series of sessions."""

import signal
import time
from collections.abc import Callable

import pytest

from tests.robustness.attack.confined import ConfinedServer
from tests.support.servers.running import MODEL, Tenant, mock_config, sample_body

pytestmark = pytest.mark.attack

TINY = "random://llama-tiny"
FINISHED = {"reason": {"type": "success"}, "detail": None}
Confined = Callable[..., ConfinedServer]


def tiny_config(**sections: object) -> dict[str, object]:
    model = {"model_id": TINY, "backend": "transformers", "device": "cpu", "dtype": "fp32"}
    return {
        "applications": [
            {"name": "server", "import_path": "server"},
            {"name": "model", "import_path": "model", "args": model},
            {"name": "sampler", "import_path": "sampler", "args": {"model_id": TINY, "sampler_type": "torch"}},
        ],
        **sections,
    }


def sampler(tenant: Tenant, model: str) -> tuple[str, str]:
    """Create a session and a sampling session of the base model; return both ids."""
    session = tenant.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": model}
    return session, str(tenant.post("create_sampling_session", body).json()["sampling_session_id"])


def test_the_31st_script_in_half_an_hour(confined_server: Confined) -> None:
    """Forty scripts with default limits; each trains a step and ends without closing its session."""
    server = confined_server(mock_config(limits={"silent_session_seconds": 2.0}), housekeeping=0.5)
    tenant = Tenant(server.url, "tml-scripts")
    last = ""
    for number in range(40):
        if number in (30, 35):
            time.sleep(2.5)  # stands for the minutes by which silence is normally measured
        last = tenant.model()
        tenant.result(tenant.forward_backward(last, 1))
    assert tenant.loss(tenant.forward_backward(last, 2)) > 0


def test_samples_of_a_killed_client(confined_server: Confined) -> None:
    """A killed client left a thousand long sequences; another tenant wants ten tokens."""
    server = confined_server(tiny_config(limits={"silent_session_seconds": 8.0}), housekeeping=1)
    killed, other = Tenant(server.url, "tml-killed"), Tenant(server.url, "tml-other")
    _, name = sampler(other, TINY)
    small = {"max_tokens": 10, "seed": 1, "stop": []}
    began = time.monotonic()
    other.tokens(other.submit("asample", sample_body(name, 0, sampling_params=small)))
    alone = time.monotonic() - began
    _, crowd = sampler(killed, TINY)
    long = {"max_tokens": 1500, "seed": 1, "stop": []}
    requests = [
        killed.submit("asample", sample_body(crowd, seq, sampling_params=long, num_samples=4)) for seq in range(250)
    ]
    killed.http.close()  # like kill -9: no more polls or heartbeats
    time.sleep(1)
    began = time.monotonic()
    other.tokens(other.submit("asample", sample_body(name, 1, sampling_params=small)))
    beside = time.monotonic() - began
    deadline = time.monotonic() + 120
    while waiting(other) and time.monotonic() < deadline:
        time.sleep(0.5)
    print(f"\nten tokens: alone {alone:.2f} s, beside a thousand sequences {beside:.2f} s")
    assert waiting(other) == 0, "they are cancelled"
    assert beside < 30
    again = Tenant(server.url, "tml-killed")
    assert again.poll(requests[-1]).status_code == 410, "whoever comes back sends it again"


def waiting(tenant: Tenant) -> int:
    return int(next(iter(tenant.get("status").json()["models"].values()))["waiting_samples"])


def test_a_stopped_server(confined_server: Confined) -> None:
    """The server is suspended with SIGSTOP for longer than the session timeout."""
    server = confined_server(mock_config(limits={"session_timeout_seconds": 6.0}), housekeeping=0.5)
    tenant = Tenant(server.url, "tml-stopped")
    session = tenant.session()
    model = tenant.model(session)
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(10)
    server.process.send_signal(signal.SIGCONT)
    for _ in range(5):
        time.sleep(1)
        assert tenant.post("session_heartbeat", {"session_id": session}).status_code == 200
    assert tenant.loss(tenant.forward_backward(model, 1)) > 0


def test_rows_for_ever(confined_server: Confined) -> None:
    """Sessions store as much metadata as they may and end at once."""
    limits = {"max_session_rows_per_tenant": 200, "ended_session_retention_seconds": 1.0}
    server = confined_server(mock_config(limits=limits), housekeeping=0.5)
    tenant = Tenant(server.url, "tml-rows")
    large = {"tags": ["x" * 4096] * 100, "user_metadata": {"m": "y" * 65_000}}
    refused = tenant.post("create_session", large)
    assert refused.status_code == 400
    assert "tags" in refused.json()["detail"]
    allowed = {"tags": ["é" * 250] * 5, "user_metadata": {"m": "y" * 16_000}}
    sizes: list[int] = []
    for _ in range(3):
        for _ in range(300):
            answer = tenant.post("create_session", allowed)
            if answer.status_code == 429:
                assert "max_session_rows_per_tenant" in answer.json()["detail"]
                continue
            name = answer.json()["session_id"]
            body = {"session_id": name, "sampling_session_seq_id": 0, "base_model": MODEL}
            tenant.post("create_sampling_session", body)
            tenant.post(f"sessions/{name}/finish", {"reason": {"type": "errored"}, "detail": "z" * 65_000})
        time.sleep(2)
        sizes.append((server.data_dir / "state.db").stat().st_size)
    print(f"\nstate.db after each 300 sessions: {[f'{size / 2**20:.1f} MiB' for size in sizes]}")
    assert sizes[-1] < 16 * 2**20
    assert Tenant(server.url, "tml-other").session()
