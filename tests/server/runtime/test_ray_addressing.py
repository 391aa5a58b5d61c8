"""The destination of a request, found from its path and body alone."""

import json

import pytest
import zstandard

from tests.support.servers.running import training_body
from twinkle.server.app import ROUTES
from twinkle.server.http.asgi_relay import HttpRequest
from twinkle.server.http.owners import (
    OfModel,
    OfNewRun,
    OfNewSampler,
    OfOpenAiModel,
    OfProcessors,
    OfRun,
    OfSampler,
)
from twinkle.server.http.routes import RouteFacts
from twinkle.server.ids import CheckpointPath
from twinkle.server.runtime.ray.directory import destination_of
from twinkle.server.runtime.ray.layout import Replicas
from twinkle.server.wire.peeking import text_field

SESSION = "session_" + "0" * 32
RUN = "s-1:train:0"
CHECKPOINT = CheckpointPath.parse(f"tinker://{RUN}/weights/w")


def request(path: str, body: object = b"", method: str = "POST", **headers: str) -> HttpRequest:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    raw = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())
    return HttpRequest(method, path, b"", raw, content, None)


def facts_of(asked: HttpRequest) -> RouteFacts:
    return ROUTES.find(asked.method, asked.path)[0]


def native(verb: str, body: object, kind: str = "model") -> HttpRequest:
    return request(f"/api/v1/{kind}/org/name/twinkle/{verb}", body, x_twinkle_session_id=SESSION)


@pytest.mark.parametrize(
    ("asked", "address"),
    [
        (request("/api/v1/optim_step", {"model_id": RUN, "seq_id": 1}), OfRun(RUN)),
        (request("/api/v1/forward", {"model_id": RUN}), OfRun(RUN)),
        (request("/api/v1/unload_model", {"model_id": RUN}), OfRun(RUN)),
        (request("/api/v1/forward_backward", training_body(RUN, 1)), OfRun(RUN)),
        (
            request("/api/v1/forward_backward", zstandard.compress(training_body(RUN, 1)), content_encoding="zstd"),
            OfRun(RUN),
        ),
        (request("/api/v1/retrieve_future", {"request_id": f"{RUN}:3"}), OfRun(RUN)),
        (request("/api/v1/retrieve_future", {"request_id": "s-1:sample:0:3"}), OfSampler("s-1:sample:0")),
        (request("/api/v1/cancel_future", {"request_id": "s-1:sample:0:3"}), OfSampler("s-1:sample:0")),
        (request("/api/v1/retrieve_futures", {"target": {"sampling_session_id": "a"}}), OfSampler("a")),
        (request("/api/v1/asample", {"sampling_session_id": "a", "seq_id": 1}), OfSampler("a")),
        (
            request("/api/v1/create_model", {"session_id": "s-1", "model_seq_id": 0, "base_model": "m"}),
            OfNewRun(RUN, "m"),
        ),
        (
            request("/api/v1/load_weights", {"session_id": "s-1", "model_seq_id": 0, "path": str(CHECKPOINT)}),
            OfNewRun(RUN, None, CHECKPOINT),
        ),
        (
            request("/api/v1/create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 2}),
            OfNewSampler("s:sample:2", None, None),
        ),
        (request("/v1/chat/completions", {"model": "m"}), OfOpenAiModel("m")),
        (request("/api/v1/completions", {"model": "m"}), OfOpenAiModel("m")),
        (request("/v1/models/org/name", method="GET"), OfOpenAiModel("org/name")),
        (native("forward_backward", {"adapter_name": "a"}), OfRun(f"{SESSION}-a", "org/name")),
        (native("add_adapter_to_model", {"adapter_name": "a"}), OfNewRun(f"{SESSION}-a", "org/name")),
        (native("create", {}), OfModel("org/name")),
        (native("upload_to_hub", {}), OfModel("org/name", first=True)),
        (native("sample", {"adapter_name": "a"}, "sampler"), OfRun(f"{SESSION}-a", "org/name")),
        (native("sample_stream", {"adapter_uri": str(CHECKPOINT)}, "sampler"), OfRun(RUN, "org/name")),
        (native("sample", {}, "sampler"), OfModel("org/name")),
        (request("/api/v1/model/org/name/healthz", method="GET"), OfModel("org/name", first=True)),
        (request("/api/v1/processor/twinkle/call", x_twinkle_session_id=SESSION), OfProcessors(SESSION)),
    ],
)
def test_addresses(asked, address):
    assert destination_of(asked, 2**20).address == address


@pytest.mark.parametrize(
    "asked",
    [
        request("/api/v1/healthz", method="GET"),
        request("/api/v1/create_session", {"tags": []}),
        request("/api/v1/training_runs", method="GET"),
        request("/v1/models", method="GET"),
        request("/api/v1/optim_step", b"{"),
        request("/api/v1/optim_step", b"[" * 100_000),
        request("/api/v1/optim_step", {"model_id": 5}),
        request("/api/v1/forward_backward", b"\xff\xff"),
        request("/api/v1/forward_backward", b"x", content_encoding="zstd"),
        request("/api/v1/retrieve_future", {"request_id": "nonsense"}),
        request("/api/v1/retrieve_futures", {"target": 3}),
        request("/api/v1/create_model", {"session_id": 1, "model_seq_id": "0"}),
        request("/v1/chat/completions", {"model": None}),
    ],
)
def test_what_concerns_nobody_in_particular(asked):
    assert destination_of(asked, 2**20).address is None


def test_streams():
    assert destination_of(request("/v1/completions", {"model": "m", "stream": True}), 2**20).streams
    assert not destination_of(request("/v1/completions", {"model": "m"}), 2**20).streams
    assert destination_of(native("sample_stream", {}, "sampler"), 2**20).streams


def test_what_ends_with_its_client():
    waiting = [
        request("/api/v1/retrieve_future", {}),
        request("/api/v1/retrieve_futures", {}),
        request("/v1/completions", {}),
        request("/api/v1/twinkle/checkpoints/r/weights/a/archive", method="GET"),
        native("sample", {}, "sampler"),
        native("sample_stream", {}, "sampler"),
    ]
    assert all(facts_of(each).ends_with_client for each in waiting)
    lasting = [
        request("/api/v1/forward_backward", {}),
        request("/api/v1/create_model", {}),
        request("/api/v1/sessions/s/finish", {}),
        native("forward_backward", {}),
        native("set_template", {}, "sampler"),
    ]
    assert not any(facts_of(each).ends_with_client for each in lasting)


def test_how_long_bodies_may_be():
    assert facts_of(request("/api/v1/forward_backward")).limit is None
    assert facts_of(request("/api/v1/processor/twinkle/call")).limit is None
    # rows may have images; what may be large beside them is checked when the body is read
    assert facts_of(request("/api/v1/model/org/name/twinkle/forward_backward")).limit is None
    assert facts_of(request("/v1/chat/completions")).limit == 2**25  # with images
    assert facts_of(request("/api/v1/optim_step")).limit == 2**20
    assert facts_of(request("/nowhere")).limit == 2**22


def test_a_field_is_found_without_decoding():
    body = training_body("model-1", 1)
    assert text_field(body, 1) == "model-1"
    assert text_field(body + training_body("model-2", 1), 1) == "model-2"  # the last value counts
    assert text_field(body[:-1], 1) is None
    assert text_field(b"", 1) is None
    assert text_field(b"\x0b", 1) is None  # a protobuf group
    assert text_field(b"\x80" * 50, 1) is None


def test_owners_of_runs():
    replicas = Replicas(("m-0", "m-1", "m-2"))
    assert replicas.owner("run", "m-2") == "m-2"
    assert replicas.owner("run", "gone") == replicas.owner("run", "") == replicas.chosen("run")
    assert {replicas.chosen(str(number)) for number in range(50)} == set(replicas.names)
    assert replicas.emptiest("run", {"m-0": 3, "m-1": 1, "m-2": 2}) == "m-1"
    assert replicas.emptiest("run", {"m-0": 3}) in ("m-1", "m-2")
