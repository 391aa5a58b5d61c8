"""Certificate checks and timeouts of a client, and that it can always be closed, whatever the server does."""

import httpx
import pytest

from tests.clients.twinkle.stub_server import Slow
from twinkle_client import InvalidRequestError
from twinkle_client.client import session as client_module
from twinkle_client.client import transport
from twinkle_client.client.retries import Backoff, RetryPolicy


@pytest.mark.parametrize(
    ("address", "proxy", "checked"),
    [
        ("http://host", None, False),
        ("HTTP://host", None, False),
        ("https://host", None, True),
        ("HTTPS://host", None, True),
        ("Https://host/api/v1", None, True),
        ("http://host", "http://proxy", False),
        ("http://host", "HTTPS://proxy", True),
    ],
)
def test_certificates_are_checked_wherever_there_is_tls(monkeypatch, address, proxy, checked):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    if proxy is not None:
        monkeypatch.setenv("HTTP_PROXY", proxy)
    given = {}

    class Recorded(httpx.Client):
        def __init__(self, **options):
            given.update(options)
            super().__init__(transport=options["transport"])

    monkeypatch.setattr(transport.httpx, "Client", Recorded)
    transport.Transport(address, "key", RetryPolicy(), 1.0, httpx.MockTransport(lambda _: httpx.Response(200))).close()
    assert given["verify"] is checked


def test_waits_stay_bounded_however_often_a_request_fails():
    backoff = Backoff(RetryPolicy(deadline=1e9, longest_wait=10.0))
    assert all(0 < backoff.next_wait() <= 10.0 for _ in range(1100))


def test_a_server_that_is_slow_to_end_a_session_is_left_to_it(stub, connect, monkeypatch, caplog):
    monkeypatch.setattr(client_module, "_BEAT_SECONDS", 0.3)
    client = connect()
    stub.fail("/twinkle/finish_session", Slow(2.0))
    with caplog.at_level("WARNING"):
        client.close()
    assert "end of session" in caplog.text
    assert "by itself" in caplog.text
    with pytest.raises(InvalidRequestError, match="closed"):
        client.get_server_capabilities()
    client.close()
    assert len(stub.asked("/twinkle/finish_session")) == 1


def test_closing_may_be_interrupted(stub, connect, monkeypatch):
    client = connect()

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_finish_session", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    assert client._transport._http.is_closed
    assert client._beats._http.is_closed
    client.close()
