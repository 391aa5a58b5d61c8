"""Sessions and futures: what the server tells the SDK while it waits."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
import tinker

from tests.support.servers.running import Tenant
from tests.support.servers.serving import MODEL, SdkServer, key_of, sequences, tinker_data


@pytest.fixture(scope="module", autouse=True)
def long_poll(server: SdkServer) -> "Iterator[Future[tuple[str, float, httpx.Response]]]":
    """A poll for a result that never comes, which begins before all tests of this file: request, seconds, answer."""

    def poll() -> tuple[str, float, httpx.Response]:
        tenant = Tenant(server.url, key_of("long poll"))
        session_id = tenant.session()
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        tenant.result(tenant.submit("create_model", body))
        waiting = tenant.forward_backward(f"{session_id}:train:0", 2)  # number 1 is never sent
        started = time.monotonic()
        answer = tenant.http.post("retrieve_future", json={"request_id": waiting}, timeout=45)
        return waiting, time.monotonic() - started, answer

    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(poll)


def test_a_session_knows_what_was_made_in_it(server: SdkServer, request: pytest.FixtureRequest) -> None:
    name = request.node.name
    service = tinker.ServiceClient(base_url=server.url, api_key=key_of(name), user_metadata={"recipe": "r"})
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    training.save_weights_and_get_sampling_client()
    session_id = training.model_id.partition(":")[0]
    found = server.rest(name).get_session(session_id).result()
    assert found.training_run_ids == [training.model_id]
    assert len(found.sampler_ids) == 1
    assert found.user_metadata == {"recipe": "r"}


def test_a_heartbeat_ends_with_the_session(server: SdkServer, request: pytest.FixtureRequest) -> None:
    service = server.service(request.node.name)
    session_id = service.create_lora_training_client(base_model=MODEL, rank=4).model_id.partition(":")[0]
    with httpx.Client(headers={"x-api-key": key_of(request.node.name)}, trust_env=False) as client:
        url = f"{server.url}/api/v1/session_heartbeat"
        assert client.post(url, json={"session_id": session_id}).status_code == 200
        service.close("success").result()
        assert client.post(url, json={"session_id": session_id}).status_code == 410


def test_the_sdk_stays_silent_while_it_reports(server: SdkServer, request: pytest.FixtureRequest) -> None:
    """Telemetry and heartbeats are sent every ten seconds; the fixture fails the test on any warning about them."""
    training = server.service(request.node.name).create_lora_training_client(base_model=MODEL, rank=4)
    training.forward(tinker_data(sequences(1)), "cross_entropy").result()
    time.sleep(12)
    training.forward(tinker_data(sequences(1)), "cross_entropy").result()


@pytest.mark.slow
def test_a_future_that_takes_long_is_waited_for(long_poll: "Future[tuple[str, float, httpx.Response]]") -> None:
    """A poll is answered within the SDK's timeout of 45 s.

    The answer says that there is no result yet and names the queue's state.
    """
    waiting, seconds, answer = long_poll.result()
    assert 5 < seconds < 40
    assert answer.status_code == 408
    assert answer.json() == {"type": "try_again", "request_id": waiting, "queue_state": "active"}
