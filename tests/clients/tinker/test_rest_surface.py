"""What the SDK offers besides training and sampling, on a server that is configured to use all of it.

Clients exchange keys for tokens, and a model is created from a checkpoint in one request. The backend is the mock.
"""

import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tinker
from tinker import types

from tests.support.servers.serving import MODEL, SdkServer, key_of, sequences, tinker_data


# for the whole test run: some clients cannot be closed, and would complain when their server is gone
@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    sections = {"auth": {"jwt": True}, "clients": {"create_model_by_loading": True}}
    running = SdkServer(tmp_path_factory.mktemp("surface"), "mock", sections).start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of a tenant that no other test uses."""
    return str(request.node.name)


@pytest.fixture
def connect(server: SdkServer, name: str) -> Iterator[Callable[..., tinker.ServiceClient]]:
    """Makes clients and closes them at the end of the test, because clients of a stopped server would complain."""
    made: list[tinker.ServiceClient] = []

    def new(**options: Any) -> tinker.ServiceClient:
        made.append(tinker.ServiceClient(base_url=server.url, api_key=key_of(name), **options))
        return made[-1]

    yield new
    for service in made:
        service.close("success").result()


@pytest.fixture
def training(connect: Callable[..., tinker.ServiceClient]) -> tinker.TrainingClient:
    return connect().create_lora_training_client(base_model=MODEL, rank=4, user_metadata={"a": "1"})


def search(rest: tinker.RestClient, **wanted: Any) -> types.SessionSearchResponse:
    return rest.search_sessions(types.SessionSearchRequest(**wanted)).result()


def test_whoami(server: SdkServer, name: str, training: tinker.TrainingClient) -> None:
    rest = server.rest(name)
    assert rest.whoami().result().user_urn == rest.get_training_run(training.model_id).result().model_owner


def test_a_wrong_key_is_told_at_once(server: SdkServer) -> None:
    wrong = tinker.ServiceClient(base_url=server.url, api_key="eyJub25lIjoib2Ygb3VycyJ9.e30.x")
    with pytest.raises(tinker.AuthenticationError, match="API key"):
        wrong.get_server_capabilities()


def test_a_model_begins_as_a_checkpoint(
    server: SdkServer, name: str, training: tinker.TrainingClient, connect: Callable[..., tinker.ServiceClient]
) -> None:
    """The model is created in one request: no create_model is sent."""
    training.forward_backward(tinker_data(sequences(1)), "cross_entropy").result()
    training.optim_step(types.AdamParams()).result()
    path = training.save_state("here").result().path
    resumed = connect().create_training_client_from_state_with_optimizer(path, user_metadata={"a": "2"})
    session = resumed.model_id.partition(":")[0]
    trace = server.rest(name).export_session_trace(session).result()
    kinds = [event["name"] for event in json.load(urllib.request.urlopen(trace))["traceEvents"] if event["ph"] == "X"]
    assert kinds == ["create_from"]
    data = tinker_data(sequences(2))
    losses = [one.forward(data, "cross_entropy").result().metrics["loss:sum"] for one in (training, resumed)]
    assert losses[0] == losses[1]
    assert server.rest(name).get_training_run(resumed.model_id).result().user_metadata == {"a": "2"}


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")
def test_sessions_are_found_again(server: SdkServer, name: str, connect: Callable[..., tinker.ServiceClient]) -> None:
    service = connect(user_metadata={"k": "v"}, display_name="Deep Blue", project_id="p")
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    training.save_state("here").result()
    session = training.model_id.partition(":")[0]
    rest = server.rest(name)
    assert rest.list_sessions().result().sessions == [session]
    (found,) = search(rest, display_name="blue", user_metadata={"k": "v"}).sessions
    assert (found.session_id, found.project_id, found.checkpoints_count) == (session, "p", 1)
    assert found.status.type == "active"
    rest.assign_session_project(session, "q").result()
    service.close("interrupted", "enough").result()
    (found,) = search(rest, project_ids=["q"]).sessions
    assert (found.status.reason.type, found.status.detail) == ("interrupted", "enough")


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")
def test_pages_of_sessions(server: SdkServer, name: str, connect: Callable[..., tinker.ServiceClient]) -> None:
    for _ in range(3):
        connect().create_lora_training_client(MODEL, rank=4)
    rest = server.rest(name)
    everything = rest.list_sessions().result().sessions
    first = search(rest, limit=2)
    second = search(rest, limit=2, cursor=first.next_cursor)
    assert [session.session_id for session in (*first.sessions, *second.sessions)] == everything
    assert second.next_cursor is None


def test_checkpoints_are_published_kept_and_copied(
    server: SdkServer, name: str, training: tinker.TrainingClient
) -> None:
    path = training.save_state("here", ttl_seconds=4000).result().path
    rest, others = server.rest(name), server.rest("others " + name)
    with pytest.raises(tinker.NotFoundError):
        others.get_weights_info_by_tinker_path(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert others.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    copied = others.copy_weights(path, "mine").result()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        others.get_weights_info_by_tinker_path(path).result()
    assert others.get_weights_info_by_tinker_path(copied).result().lora_rank == 4
    with pytest.raises(tinker.BadRequestError, match="weights_access_token"):
        rest.copy_weights(path, "mine", weights_access_token="t").result()
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    (listed,) = rest.list_user_checkpoints().result().checkpoints
    assert (listed.expires_at, listed.public) == (None, False)


def test_the_audit_log(server: SdkServer, name: str, training: tinker.TrainingClient) -> None:
    path = training.save_state("here").result().path
    admin = tinker.AdminClient(base_url=server.url, api_key=key_of(name))
    everything = admin.get_audit_log().result().entries
    assert [entry.event for entry in everything] == ["session_create", "checkpoint_save"]
    (saved,) = admin.get_audit_log("checkpoints", everything[1].timestamp.date()).result().entries
    assert (saved.event, saved.tinker_path) == ("checkpoint_save", path)
