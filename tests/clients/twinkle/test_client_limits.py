"""Limits that a script meets: full ones, and the longest lifetime of an adapter."""

import threading
import time

import pytest

from tests.clients.twinkle.stub_server import Status
from tests.support.servers.running import Server, mock_config
from twinkle.errors import LimitReachedError
from twinkle_client import (
    InvalidRequestError,
    LimitError,
    LoraConfig,
    NotFoundError,
    TwinkleClient,
    TwinkleClientError,
    init_twinkle_client,
    initialize,
)
from twinkle_client.client import current
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.protocol.base import LIMIT_REACHED

ROWS = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}]
PATH = "/twinkle/get_server_capabilities"
MODELS = {"supported_models": [{"model_name": "m"}]}
FULL = Status(429, {"detail": "adapters: 4 of 4 in use", "code": LIMIT_REACHED}, {"Retry-After": "0"})
BUSY = Status(429, {"detail": "queued ops: 4 of 4 in use"}, {"Retry-After": "0"})


@pytest.fixture(autouse=True)
def _default_client(monkeypatch):
    monkeypatch.setattr(current, "_default", None)


def test_server_and_client_have_one_code():
    assert LimitReachedError.code == LIMIT_REACHED


def test_a_full_limit_is_an_error_at_once(stub, connect):
    client = connect(retry_deadline=60)
    stub.answer(PATH, MODELS)
    stub.fail(PATH, FULL)
    with pytest.raises(LimitError, match="4 of 4 in use") as caught:
        client.get_server_capabilities()
    assert caught.value.code == LIMIT_REACHED
    assert len(stub.asked(PATH)) == 1


def test_what_passes_by_itself_is_waited_for(stub, client):
    stub.answer(PATH, MODELS)
    stub.fail(PATH, BUSY, BUSY)
    client.get_server_capabilities()
    assert len(stub.asked(PATH)) == 3


def test_who_wants_to_wait_waits(stub, connect, caplog):
    client = connect(retry_deadline=0, wait_for_limits=30)
    stub.answer(PATH, MODELS)
    stub.fail(PATH, FULL, FULL)
    client.get_server_capabilities()
    assert len(stub.asked(PATH)) == 3
    assert "trying again for up to 30 s" in caplog.text
    stub.fail(PATH, FULL, BUSY)  # the other deadline is still that of retry_deadline
    with pytest.raises(LimitError, match="queued ops"):
        client.get_server_capabilities()


@pytest.mark.parametrize("connect_by", [init_twinkle_client, initialize, TwinkleClient])
def test_every_way_to_connect_takes_the_option(stub, monkeypatch, connect_by):
    monkeypatch.setenv("TWINKLE_SERVER_URL", stub.url)
    with connect_by(wait_for_limits=7) as client:
        assert client._transport.retries.wait_for_limits == 7
    monkeypatch.setenv("TWINKLE_WAIT_FOR_LIMITS", "8.5")
    with connect_by() as client:
        assert client._transport.retries.wait_for_limits == 8.5
    for wrong in ("soon", "-1", "inf"):
        monkeypatch.setenv("TWINKLE_WAIT_FOR_LIMITS", wrong)
        with pytest.raises(InvalidRequestError, match=rf"TWINKLE_WAIT_FOR_LIMITS: got '{wrong}', allowed: seconds"):
            connect_by()
    with pytest.raises(InvalidRequestError, match="wait_for_limits: got -2"):
        connect_by(wait_for_limits=-2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = {"max_adapters_per_tenant": 1, "max_sessions_per_tenant": 2}
    server = Server(tmp_path_factory.mktemp("limits"), mock_config(limits=limits)).start()
    yield server
    server.close()


def test_limits_of_a_server(server):
    """Each text names the limit, its value and what frees a place."""
    with TwinkleClient(server.url, "tenant-a") as client, TwinkleClient(server.url, "tenant-a"):
        model = MultiLoraTransformersModel("mock", client=client)
        model.add_adapter_to_model("first", LoraConfig(r=4))
        with pytest.raises(LimitError, match=r"adapters: 1 of 1 in use \(max_adapters_per_tenant\)") as caught:
            model.add_adapter_to_model("second", LoraConfig(r=4))
        assert client.session_id in caught.value.detail
        assert "model.remove_adapter(name)" in caught.value.detail
        with pytest.raises(LimitError, match=r"active sessions: 2 of 2 in use .*TwinkleClient\.close\(\)"):
            TwinkleClient(server.url, "tenant-a")


def test_a_place_that_becomes_free_ends_the_wait(server):
    with TwinkleClient(server.url, "tenant-b", wait_for_limits=60) as client:
        model = MultiLoraTransformersModel("mock", client=client)
        model.add_adapter_to_model("first", LoraConfig(r=4))
        waiting = threading.Thread(target=model.add_adapter_to_model, args=("second", LoraConfig(r=4)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        model.remove_adapter("first")
        waiting.join(60)
        assert model.adapter_name == "second"


# --- the longest lifetime of an adapter -------------------------------------------------------------------------------


@pytest.fixture
def short_lives(tmp_path):
    """A server whose adapters live for three seconds."""
    config = mock_config(limits={"adapter_max_lifetime_seconds": 3})
    server = Server(tmp_path, config, housekeeping=0.2).start()
    yield server
    server.close()


def train_for_long(model):
    model.set_optimizer("AdamW", lr=0.01)
    for _ in range(1000):
        model.forward_backward(inputs=ROWS)
        model.clip_grad_and_step()
        time.sleep(0.05)


def test_an_adapter_that_is_too_old_ends_although_its_client_uses_it(short_lives):
    with TwinkleClient(short_lives.url, "my-token", session_heartbeat_interval=0.2) as client:
        model = MultiLoraTransformersModel("mock", client=client)
        run_id = model.add_adapter_to_model("old", LoraConfig(r=4)).adapter_name
        with pytest.raises(TwinkleClientError):
            train_for_long(model)
        said = "its state is being saved"
        while "its state is being saved" in said:
            with pytest.raises(NotFoundError, match=r"adapter_max_lifetime_seconds: 3\)") as caught:
                model.forward_backward(inputs=ROWS)
            said = caught.value.detail
        assert "kept for 7 days" in said
        kept = client.list_checkpoints(run_id)[-1].twinkle_path
        assert kept == f"twinkle://{run_id}/weights/parked"
        assert f"resume_from_checkpoint('{kept}')" in said
        model.add_adapter_to_model("new", LoraConfig(r=4))  # the session goes on
