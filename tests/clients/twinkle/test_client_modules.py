"""The modules and types that scripts written for other servers of this protocol import."""

import json

import pytest
from pydantic import BaseModel

import twinkle_client.http as plain
from tests.clients.twinkle.stub_server import Status
from twinkle_client import ConnectionLostError, GoneError, InvalidRequestError, LoraConfig, NotFoundError, types
from twinkle_client.client import current
from twinkle_client.common.serialize import deserialize_object, serialize_object
from twinkle_client.dataset import DatasetMeta
from twinkle_client.types import CreateModelRequest, ForwardOnlyRequest

NAMES = [
    "CreateSessionRequest",
    "CreateSessionResponse",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
    "SupportedModel",
    "GetServerCapabilitiesResponse",
    "HealthResponse",
    "DeleteCheckpointResponse",
    "ErrorResponse",
    "WeightsInfoRequest",
    "ServerWeightsInfoResponse",
    "CheckpointPathResponse",
    "CapacityInfoResponse",
    "Cursor",
    "Checkpoint",
    "TrainingRun",
    "TrainingRunsResponse",
    "CheckpointsListResponse",
    "ParsedCheckpointTwinklePath",
    "WeightsInfoResponse",
    "LoraConfig",
    "CreateModelRequest",
    "ResolvedLoadPath",
    "CreateRequest",
    "ForwardRequest",
    "ForwardOnlyRequest",
    "AdapterRequest",
    "SetLossRequest",
    "SetOptimizerRequest",
    "SetLrSchedulerRequest",
    "SaveRequest",
    "UploadToHubRequest",
    "LoadRequest",
    "ResumeFromCheckpointRequest",
    "AddAdapterRequest",
    "SetTemplateRequest",
    "SetProcessorRequest",
    "CalculateMetricRequest",
    "GetStateDictRequest",
    "ClipGradAndStepRequest",
    "ApplyPatchRequest",
    "AddMetricRequest",
    "OkResponse",
    "BackwardResponse",
    "StepResponse",
    "ZeroGradResponse",
    "LrStepResponse",
    "SetLossResponse",
    "SetOptimizerResponse",
    "SetLrSchedulerResponse",
    "LoadResponse",
    "SetTemplateResponse",
    "SetProcessorResponse",
    "ClipGradAndStepResponse",
    "ApplyPatchResponse",
    "AddMetricResponse",
    "ModelResult",
    "ForwardResponse",
    "ForwardBackwardResponse",
    "CalculateLossResponse",
    "ClipGradNormResponse",
    "GetTrainConfigsResponse",
    "GetStateDictResponse",
    "CalculateMetricResponse",
    "SaveResponse",
    "TrainingProgressResponse",
    "UploadToHubResponse",
    "UploadStatusResponse",
    "CreateResponse",
    "AddAdapterResponse",
    "SampleRequest",
    "SampledSequenceModel",
    "SampleResponseModel",
    "SampleResponseModelList",
    "SamplerSetTemplateRequest",
    "SamplerSetTemplateResponse",
    "SamplerAddAdapterRequest",
    "SamplerAddAdapterResponse",
    "SamplerCreateResponse",
    "ProcessorCreateRequest",
    "ProcessorCreateResponse",
    "ProcessorCallRequest",
    "ProcessorCallResponse",
    "ProcessorHeartbeatRequest",
    "ProcessorHeartbeatResponse",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_type_of_the_protocol_is_there(name):
    assert name in types.__all__
    assert issubclass(getattr(types, name), BaseModel)


def test_types_have_the_protocols_fields():
    assert ForwardOnlyRequest(inputs=[]).adapter_name is None
    assert ForwardOnlyRequest(inputs=[], disable_lora=True).arguments == {"disable_lora": True}
    model = CreateModelRequest(base_model="m", lora_config={"rank": 4})
    assert model.model_dump() == {
        "base_model": "m",
        "lora_config": {"rank": 4, "train_unembed": False, "train_mlp": True, "train_attn": True},
        "save_dir": None,
        "user_metadata": None,
    }
    assert types.StepResponse().model_dump() == {"status": "ok"}
    assert types.ClipGradAndStepRequest(adapter_name="a").norm_type == 2


def test_names_of_other_modules():
    from twinkle_client.client import TwinkleClient
    from twinkle_client.manager import TwinkleClient as Same
    from twinkle_client.manager import TwinkleClientError
    from twinkle_client.tinker_sdk import patch_tinker
    from twinkle_client.utils.patch_tinker import patch_tinker as same_patch

    assert Same is TwinkleClient
    assert same_patch is patch_tinker
    assert issubclass(NotFoundError, TwinkleClientError)


# --- objects as text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "text",
        "8",
        "null",
        5,
        0.5,
        True,
        None,
        [1, 2],
        DatasetMeta("hf://a/b", "main", "test", range(0, 9, 2)),
        DatasetMeta("hf://a/b", data_slice=[3, 1]),
        DatasetMeta(data=[{"x": 1}]),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    ],
    ids=repr,
)
def test_there_and_back(value):
    assert deserialize_object(serialize_object(value)) == value


def test_objects_become_text_that_says_what_it_is():
    peft = pytest.importorskip("peft")
    from twinkle.dataset import DatasetMeta as LibraryMeta

    assert json.loads(serialize_object(LibraryMeta("hf://a/b")))["_TWINKLE_TYPE_"] == "DatasetMeta"
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    said = json.loads(serialize_object(config))
    assert (said["_TWINKLE_TYPE_"], said["r"], said["lora_dropout"]) == ("LoraConfig", 4, 0.0)
    assert deserialize_object(serialize_object(config)) == LoraConfig(r=4, target_modules=["q_proj"])
    assert json.loads(serialize_object({"a": 1})) == {"a": 1}
    assert deserialize_object('{"a": 1}') == {"a": 1}
    assert serialize_object(types.OkResponse()) == {"status": "ok"}
    assert deserialize_object({"a": 1}) == {"a": 1}


@pytest.mark.parametrize("value", [print, object(), LoraConfig, DatasetMeta])
def test_code_is_never_text(value):
    with pytest.raises(InvalidRequestError, match="code"):
        serialize_object(value)


def test_types_that_nobody_knows():
    with pytest.raises(InvalidRequestError, match="Mesh"):
        deserialize_object('{"_TWINKLE_TYPE_": "Mesh"}')


# --- single requests --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(current, "_default", None)
    yield
    for forget in (plain.set_base_url, plain.set_api_key, plain.set_session_id, plain.set_request_id):
        forget(None)


def test_requests_as_the_default_client(stub, client, monkeypatch):
    monkeypatch.setattr(current, "_default", client)
    stub.answer("/twinkle/x", {"a": 1})
    assert plain.get_base_url() == f"{stub.url}/api/v1"
    assert plain.http_get(f"{plain.get_base_url()}/twinkle/x", params={"limit": 3}).json() == {"a": 1}
    plain.http_post(f"{plain.get_base_url()}/twinkle/x", {"rows": [1]}, additional_headers={"X-More": "yes"})
    plain.http_post(f"{plain.get_base_url()}/twinkle/x")
    plain.http_delete(f"{plain.get_base_url()}/twinkle/x")
    got, posted, empty, deleted = stub.asked("/twinkle/x")
    assert (got.query, posted.body, empty.body, deleted.method) == ("limit=3", {"rows": [1]}, {}, "DELETE")
    assert posted.headers["x-more"] == "yes"
    assert got.headers["authorization"] == got.headers["twinkle-authorization"] == "Bearer my-token"
    assert got.headers["x-twinkle-session-id"] == client.session_id
    assert got.headers["x-request-id"] == posted.headers["serve-multiplexed-model-id"] == plain.get_request_id()


def test_requests_of_a_script_that_says_who_it_is(stub, monkeypatch):
    monkeypatch.setenv("TWINKLE_SERVER_URL", "http://elsewhere:1/")
    monkeypatch.setenv("TWINKLE_SERVER_TOKEN", "from-the-environment")
    assert plain.get_base_url() == "http://elsewhere:1/api/v1"
    assert plain.get_api_key() == "from-the-environment"
    assert plain.get_session_id() is None
    plain.set_base_url(f"{stub.url}/")
    plain.set_api_key("mine")
    plain.set_session_id("s1")
    plain.set_request_id("r1")
    plain.http_get(f"{plain.get_base_url()}/twinkle/healthz")
    headers = stub.asked("/twinkle/healthz")[0].headers
    assert headers["authorization"] == "Bearer mine"
    assert (headers["x-twinkle-session-id"], headers["x-request-id"]) == ("s1", "r1")


def test_errors_of_single_requests_are_the_clients(stub):
    with pytest.raises(NotFoundError, match="no route"):
        plain.http_get(f"{stub.url}/api/v1/nothing")
    stub.fail("/twinkle/healthz", Status(410, {"detail": "over"}))
    with pytest.raises(GoneError, match="over"):
        plain.http_get(f"{stub.url}/api/v1/twinkle/healthz")
    with pytest.raises(ConnectionLostError):
        plain.http_get("http://127.0.0.1:9/x", timeout=2.0)
    with pytest.raises(InvalidRequestError, match="url"):
        plain.http_get("nonsense://x")
