"""A data directory of an earlier version opens and continues to work, through both protocols. See stored_data.py."""

import json
import tarfile

import httpx
import pytest

from tests.support.paths import PROGRAMS
from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import MODEL, Server, Tenant
from tests.support.servers.stored_data import CONFIG, NATIVE_LAST, Expected, ask_native, data, native_state

ARCHIVES = sorted((PROGRAMS / "data").glob("*.tar.gz"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A server on the unpacked directory, and the expected results."""
    directory = tmp_path_factory.mktemp("older")
    with tarfile.open(request.param) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(directory)
    expected = Expected(**json.loads((directory / "expected.json").read_text()))
    server = Server(directory, CONFIG).start()
    yield server, expected
    server.close()


@pytest.fixture
def alice(opened: tuple[Server, Expected]) -> Tenant:
    server, expected = opened
    return Tenant(server.url, expected.keys["alice"])


def test_what_waited_is_answered_and_training_goes_on(opened, alice):
    _, expected = opened
    assert alice.loss(expected.answered) == expected.answered_loss
    assert {request_id: alice.loss(request_id) for request_id in expected.waiting} == expected.waiting
    assert alice.loss(alice.forward_backward(expected.model_id, 16, data(60))) == expected.loss_after


def test_published_weights_sample_as_before(opened, alice):
    _, expected = opened
    assert alice.tokens(alice.sample(expected.sampling_session_id)) == expected.tokens


def test_checkpoints_load(opened, alice):
    """A saved checkpoint, and the one that an adapter became when its session ended."""
    _, expected = opened
    model = alice.model(seed=9)
    alice.json(alice.load(model, 1, expected.checkpoint))
    assert alice.loss(alice.forward_backward(model, 2, data(61))) == expected.loss_of_checkpoint
    alice.json(alice.load(model, 3, expected.evicted_checkpoint))
    assert alice.loss(alice.forward_backward(model, 4, data(62))) == expected.loss_of_evicted
    refusal = alice.error(alice.forward_backward(expected.evicted_model_id, 3, data(62)))
    assert expected.evicted_checkpoint in refusal


def test_the_native_adapter_goes_on(opened):
    server, expected = opened
    bob = NativeTenant(server.url, expected.keys["bob"], MODEL)
    bob.http.headers["X-Twinkle-Session-Id"] = expected.native_session_id
    losses = {str(number): loss for number in NATIVE_LAST if (loss := ask_native(bob, number)) is not None}
    assert losses == expected.native_losses
    assert native_state(bob, max(NATIVE_LAST) + 1) == expected.native_state


def test_unknown_keys_are_still_refused(opened):
    server, _ = opened
    answer = httpx.get(
        f"{server.url}/api/v1/get_server_capabilities", headers={"X-API-Key": "tml-other"}, trust_env=False
    )
    assert answer.status_code == 401
