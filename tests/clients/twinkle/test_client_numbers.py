"""The sequence numbers of an adapter's requests, against a real server: the client skips no number.

The server waits for a missing number for only one second, so a request behind a skipped number fails here.
"""

import pytest

from tests.support.servers.running import Server, mock_config
from twinkle_client import (
    InvalidRequestError,
    LimitError,
    LoraConfig,
    NotFoundError,
    ServerError,
    TwinkleClient,
)
from twinkle_client.model import MultiLoraTransformersModel

ROWS = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}]
FULL_AT = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = {"max_request_bytes": 20_000, "max_training_tokens_per_minute": 1000}
    server = Server(tmp_path_factory.mktemp("numbers"), mock_config(limits=limits), gap=1.0, full_at=FULL_AT).start()
    yield server
    server.close()


def adapter(client):
    model = MultiLoraTransformersModel("mock", client=client)
    model.add_adapter_to_model("default", LoraConfig(r=4))
    model.set_optimizer("AdamW", lr=0.01)
    return model


@pytest.fixture
def impatient(server, request):
    """A model of a client that never retries."""
    with TwinkleClient(server.url, request.node.name, retry_deadline=0) as client:
        yield adapter(client)


def goes_on(model):
    model.zero_grad()
    assert model.get_state_dict()["w"]


def ask(model, verb, **body):
    """Send a request for which the client has no method."""
    return model._verb(verb, None, body)


def test_a_full_disk(impatient):
    impatient.zero_grad()
    with pytest.raises(ServerError, match="disk is full") as caught:
        impatient.step()
    assert caught.value.status == 507
    goes_on(impatient)


def test_a_full_disk_that_is_emptied_is_not_even_noticed(server):
    with TwinkleClient(server.url, "patient") as client:
        model = adapter(client)
        for _ in range(FULL_AT):
            model.zero_grad()
        goes_on(model)


@pytest.mark.parametrize(
    ("verb", "body", "kind", "status"),
    [
        ("no_such_verb", {}, InvalidRequestError, 400),
        ("forward_only", {"inputs": ROWS * 1000}, InvalidRequestError, 413),
        ("forward_only", {"inputs": ROWS * 400}, LimitError, 429),
    ],
)
def test_what_is_refused_before_it_has_a_place(impatient, verb, body, kind, status):
    impatient.zero_grad()
    with pytest.raises(ServerError):  # the first attempt meets a full disk
        impatient.zero_grad()
    if status == 429:
        impatient.forward_only(inputs=ROWS * 300)
    with pytest.raises(kind) as caught:
        ask(impatient, verb, **body)
    assert caught.value.status == status
    assert caught.value.seq_id is None
    goes_on(impatient)


def test_what_is_refused_at_its_place(impatient):
    with pytest.raises(InvalidRequestError, match="NoLoss") as caught:
        impatient.set_loss("NoLoss")
    assert caught.value.seq_id == 2
    with pytest.raises(ServerError):
        impatient.zero_grad()
    goes_on(impatient)


def test_an_adapter_that_is_not_there(impatient):
    sequence = impatient.client.sequence("mock", "default")
    with pytest.raises(NotFoundError, match="nobody") as caught:
        sequence.send("/model/mock/twinkle/step", b'{"adapter_name":"nobody"}', impatient.client.post)
    assert caught.value.seq_id is None
    impatient.zero_grad()
    with pytest.raises(ServerError, match="disk is full"):
        impatient.zero_grad()
    goes_on(impatient)
