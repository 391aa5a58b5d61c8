"""What tenants leave in the journal: only what is still needed, and no more than their quota."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support.servers.running import Server, Tenant, datum, mock_config, tensor, training_body

BIG = 200_000  # tokens in a body


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def wide(seq: int, tokens: int = BIG) -> list:
    """Return rows that are far too long for the model, so the op fails when it runs.

    The body has 12 bytes per token.
    """
    return [datum(np.full(tokens, seq % 97 + 1).tolist())]


def test_the_body_of_a_refused_request_is_not_journalled(own_server: Callable[..., Server]) -> None:
    server = own_server()
    tenant = Tenant(server.url, "tml-refused")
    model = tenant.model()
    rows = [datum([1, 2, 3], unknown=tensor(np.zeros(BIG)))]
    for seq in range(1, 6):
        request = tenant.forward_backward(model, seq, rows)
        assert "unknown" in tenant.error(request)
    assert size(server.data_dir / "journal" / "bodies") < 20_000
    assert tenant.forward_backward(model, 5, rows) == request  # the same request again, recognized by its digest
    other = [datum([1, 2, 4], unknown=tensor(np.zeros(BIG)))]
    assert "used before with another request" in tenant.error(tenant.forward_backward(model, 5, other))
    server.kill()
    server.start()
    assert "unknown" in tenant.error(request)
    assert tenant.forward_backward(model, 5, rows) == request
    assert "forward_backward 1 " in tenant.error(tenant.optim_step(model, 6))


def test_a_start_frees_the_bodies_of_answered_forward_passes(own_server: Callable[..., Server]) -> None:
    """As an earlier version left them: it kept all bodies since the last snapshot."""
    server = own_server(snapshot=600.0)
    tenant = Tenant(server.url, "tml-evaluates")
    model = tenant.model()
    tenant.result(tenant.forward_backward(model, 1))
    for seq in range(2, 6):
        assert "model_input" in tenant.error(tenant.forward_backward(model, seq, wide(seq), forward_only=True))
    server.kill()
    assert size(server.data_dir / "journal" / "bodies") > 4 * BIG * 12
    server.start()
    assert size(server.data_dir / "journal" / "bodies") > 0  # the same file holds bodies that are still needed
    tenant.result(tenant.optim_step(model, 6))
    server.stop()  # writes a snapshot
    server.start()
    assert size(server.data_dir / "journal" / "bodies") == 0
    assert "unneeded files of the journal: freed 9.6 MB" in server.log()


def test_a_tenant_fills_its_part_of_the_journal_and_no_more(own_server: Callable[..., Server]) -> None:
    limits = {"max_journal_bytes_per_tenant": 1_000_000}
    server = own_server(mock_config(limits=limits), snapshot=600.0)
    tenant, other = Tenant(server.url, "tml-hoards"), Tenant(server.url, "tml-other")
    model = tenant.model()
    for seq in range(1, 5):
        # 240 kB each, needed until the next snapshot
        tenant.result(tenant.forward_backward(model, seq, wide(seq, 20_000)))
    answer = tenant.post("forward_backward", training_body(model, 5, wide(5, 20_000)))
    assert answer.status_code == 429
    assert "max_journal_bytes_per_tenant" in answer.text
    assert "bytes in the journal" in json.loads(answer.text)["detail"]
    assert other.loss(other.forward_backward(other.model(), 1)) > 0


def test_the_wait_for_a_lost_number_is_configured(own_server: Callable[..., Server]) -> None:
    server = own_server(mock_config(limits={"sequence_gap_seconds": 1.0}))
    tenant = Tenant(server.url, "tml-gap")
    model = tenant.model()
    good = tenant.forward_backward(model, 1)
    behind = tenant.forward_backward(model, 3)
    message = tenant.error(behind, seconds=20)
    assert "sequence number 2 did not arrive within 1 s" in message
    assert "the optim_step that follows will be refused" in message
    assert tenant.loss(good) > 0
    message = tenant.error(tenant.optim_step(model, 4))
    assert "optim_step 4 was not applied: forward_backward 2 before it failed or never arrived" in message
    assert "gradient since the last optim_step is dropped" in message
    assert tenant.json(tenant.optim_step(model, 5))["metrics"]["no_gradient:max"] == 1.0
