"""The duration of a long poll is configurable; here the environment variable for the key sets it."""

from collections.abc import Callable

import pytest

from tests.support.servers.running import Server, Tenant


def test_a_poll_is_answered_before_the_result_is_there(
    own_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINKLE_LONG_POLL_TIMEOUT", "0.1")
    server = own_server(None, **{"pass": 3.0})
    tenant = Tenant(server.url, "tml-a")
    future = tenant.forward_backward(tenant.model(), 1)
    assert tenant.poll(future).status_code == 408, "with the default it would wait for the pass"
    assert tenant.loss(future) > 0
    assert "note: TWINKLE_LONG_POLL_TIMEOUT: became clients.long_poll_seconds: 0.1" in server.log()
