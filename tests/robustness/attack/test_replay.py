"""Requests that must not harm the next start: large waiting passes, answered passes, ops that kill the server."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.robustness.attack.confined import ConfinedServer
from tests.support.servers.running import Tenant, datum, mock_config, training_body
from twinkle.server.wire import tinker_pb2 as pb

pytestmark = pytest.mark.attack

POISON = 13_131


def journal_bytes(server: ConfinedServer) -> int:
    return sum(file.stat().st_size for file in (server.data_dir / "journal").rglob("*") if file.is_file())


def sparse_pass(model: str, seq: int) -> bytes:
    """Return about a hundred bytes that once became 256 MiB: targets of shape (1, 33554424) without a single value."""
    targets = pb.Tensor(dtype=pb.DTYPE_INT32, shape=[1, 33_554_424])
    targets.sparse_csr.crow_indices = bytes(16)
    row = datum([1, 2, 3])  # two tokens, so it is refused when it runs
    row.loss_fn_inputs["target_tokens"].CopyFrom(targets)
    return training_body(model, seq, [row], forward_only=True)


def test_forward_passes_of_any_width_do_not_stop_the_next_start(confined_server: Callable[..., ConfinedServer]) -> None:
    server = confined_server(snapshot=600.0)
    tenant = Tenant(server.url, "tml-bomb")
    model = tenant.model()
    requests = []
    for seq in range(1, 41):
        requests.append(tenant.submit("forward_backward", sparse_pass(model, seq)))
        assert json.loads(tenant.result(requests[-1]))["category"] == "user"
    assert server.stop() == 0
    for _ in range(3):
        server.start()
        assert json.loads(tenant.result(requests[-1]))["category"] == "user"
        server.kill()


def test_many_large_passes_that_wait_are_decoded_one_after_another(
    confined_server: Callable[..., ConfinedServer],
) -> None:
    """240 MB of bodies, twice as much when decoded, must all run again; a start holds only a few at a time."""
    server = confined_server(limit=800 * 2**20, snapshot=600.0)
    tenant = Tenant(server.url, "tml-large")
    model = tenant.model()
    rows = [datum(np.full(4000, 7).tolist()) for _ in range(250)]  # 1 M tokens, 12 MB
    requests = []
    for seq in range(1, 21):
        requests.append(tenant.forward_backward(model, seq, rows))
        tenant.result(requests[-1])
    server.kill()
    server.start()
    step = tenant.optim_step(model, 21)
    assert tenant.json(step)["metrics"]["unclipped_grad_l2:mean"] > 0


def test_answered_forward_passes_are_not_read_at_the_next_start(confined_server: Callable[..., ConfinedServer]) -> None:
    """The passes are allowed: 120 MB of bodies once became 250 MB at the next start."""
    server = confined_server(limit=800 * 2**20, snapshot=600.0)
    tenant = Tenant(server.url, "tml-evaluation")
    model = tenant.model()
    empty = server.rss()
    rows = [datum(np.full(4000, 7).tolist()) for _ in range(250)]  # 1 M tokens, 12 MB
    for seq in range(1, 11):
        assert tenant.loss(tenant.forward_backward(model, seq, rows, forward_only=True)) > 0
    # by now the outcome of op 10 is in the journal
    tenant.result(tenant.forward_backward(model, 11, forward_only=True))
    server.kill()
    server.start()
    assert tenant.loss(tenant.forward_backward(model, 12)) > 0  # runs after everything that had to be replayed
    (replayed,) = re.findall(rf"replaying (\d+) ops of {re.escape(model)}", server.log())
    assert int(replayed) <= 2, "the creation, and the small pass where its outcome was not written down yet"
    grown = server.rss() - empty
    print(f"resident: {empty / 2**20:.0f} MiB when empty, {grown / 2**20:+.0f} MiB after the start")
    assert grown < 100 * 2**20


def test_forward_passes_leave_the_disk(confined_server: Callable[..., ConfinedServer]) -> None:
    """A pass has 2 kB on the wire and 50 MB unpacked; 12 of them once stayed on disk as long as their adapter lived."""
    config = mock_config(limits={"result_retention_seconds": 1.0})
    server = confined_server(config, housekeeping=1.0, snapshot=1.0)
    tenant = Tenant(server.url, "tml-disk")
    model = tenant.model()
    for seq in range(1, 13):
        row = datum(np.ones(4_000_000, int).tolist())
        body = zstandard.compress(training_body(model, seq, [row], forward_only=True))
        answer = tenant.post("forward_backward", body, **{"Content-Encoding": "zstd"})
        assert answer.status_code in (200, 413, 429), answer.text
        if answer.status_code == 200:
            tenant.result(answer.json()["request_id"])
    deadline = time.monotonic() + 120
    while journal_bytes(server) > 2 * 64 * 2**20:  # at most the content of the files that are being written
        assert time.monotonic() < deadline, journal_bytes(server)
        time.sleep(0.5)


def test_an_op_that_kills_the_server_does_so_twice(confined_server: Callable[..., ConfinedServer]) -> None:
    server = confined_server(poison=POISON, snapshot=600.0, **{"pass": 0.05})
    culprit, innocent = Tenant(server.url, "tml-culprit"), Tenant(server.url, "tml-innocent")
    bad, good = culprit.model(), innocent.model()
    requests = [innocent.forward_backward(good, seq) for seq in range(1, 20)]
    poison = culprit.forward_backward(bad, 1, [datum([1, POISON, 2])])
    assert server.process is not None
    assert server.process.wait(60) == -9
    server.spawn()
    assert server.process.wait(60) == -9
    server.start()
    outcome = json.loads(culprit.result(poison))
    assert outcome["category"] == "server"
    assert poison in outcome["error"]
    assert all(innocent.loss(request) > 0 for request in requests)
    assert Path(server.data_dir / "running").is_dir()
