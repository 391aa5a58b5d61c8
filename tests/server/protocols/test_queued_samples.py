"""Samples that wait for the device: what clients and operators see of it.

A training pass of half a minute keeps the compute thread of the server busy. The mock cannot be interrupted in the
middle of a pass, so all samples stay queued until the server is killed.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.running import MODEL, Server, Tenant, key_for, mock_config, sample_body

REASON = re.compile(
    r"queued for \d+ s, (no other sample is|1 other is) queued; training and other samples use the device"
)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose compute thread has just begun a long pass."""
    directory: Path = tmp_path_factory.mktemp("busy")
    config = mock_config(clients={"long_poll_seconds": 0.2})
    server = Server(directory, config, **{"pass": 40.0, "quiet": 0.1}).start()
    trains = Tenant(server.url, key_for("trains"))
    trains.forward_backward(trains.model(), 1)
    eventually(lambda: numbers(server)["batches"] == 1)
    yield server
    server.close()


def numbers(server: Server) -> dict[str, float]:
    answer = httpx.get(f"{server.url}/api/v1/status", trust_env=False).json()
    numbers: dict[str, float] = answer["models"][MODEL]
    return numbers


def test_a_client_and_the_dashboard_see_that_samples_are_queued(busy: Server) -> None:
    tenant, other = (Tenant(busy.url, key_for(name)) for name in ("samples", "other"))
    sampler = tenant.post(
        "create_sampling_session",
        {
            "session_id": tenant.session(),
            "sampling_session_seq_id": 0,
            "base_model": MODEL,
        },
    ).json()["sampling_session_id"]
    before = numbers(busy)
    requests = [tenant.submit("asample", sample_body(sampler, number)) for number in range(2)]
    polled = tenant.poll(requests[0])
    assert polled.status_code == 408
    assert polled.json()["type"] == "try_again"
    assert polled.json()["queue_state"] == "paused_capacity"
    assert REASON.fullmatch(polled.json()["queue_state_reason"])
    eventually(lambda: numbers(busy)["oldest_sample_wait"] > 0)
    assert numbers(busy)["queued_samples"] == before["queued_samples"] + 2
    own, others = (each.get("twinkle/adapters").json()["queues"][MODEL] for each in (tenant, other))
    assert (own["queued_samples"], own["running_samples"]) == (2, 0)
    assert (others["queued_samples"], others["running_samples"]) == (0, 0)
    for request in requests:
        assert tenant.post("cancel_future", {"request_id": request}).status_code == 200
        assert tenant.error(request) == "cancelled by its client"
    assert numbers(busy)["queued_samples"] == before["queued_samples"]


def test_a_chat_gets_comments_until_it_begins(busy: Server) -> None:
    """A client that disconnects meanwhile gives up its place."""
    before = numbers(busy)["queued_samples"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True}
    headers = {"Authorization": f"Bearer {key_for('chats')}"}
    chat = httpx.stream(
        "POST", f"{busy.url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=30
    )
    with chat as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        said = [next(lines) for _ in range(4)]
        assert numbers(busy)["queued_samples"] == before + 1
    assert said[1] == said[3] == ""
    for line in (said[0], said[2]):
        assert REASON.fullmatch(line.removeprefix(": "))
    eventually(lambda: numbers(busy)["queued_samples"] == before)
