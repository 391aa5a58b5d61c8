"""JSON requests: the SDK's dumps are accepted, everything else is refused with the field's name."""

import json

import pytest
import tinker
from tinker.types.create_model_request import CreateModelRequest as SdkCreateModel
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest as SdkCreateSamplingSession
from tinker.types.create_session_request import CreateSessionRequest as SdkCreateSession
from tinker.types.future_retrieve_request import FutureRetrieveRequest as SdkRetrieveFuture
from tinker.types.get_info_request import GetInfoRequest as SdkGetInfo
from tinker.types.load_weights_request import LoadWeightsRequest as SdkLoadWeights
from tinker.types.lora_config import LoraConfig as SdkLoraConfig
from tinker.types.optim_step_request import OptimStepRequest as SdkOptimStep
from tinker.types.optimizer import DimuonOptimizerConfig, DimuonParams
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest as SdkSaveForSampler
from tinker.types.save_weights_request import SaveWeightsRequest as SdkSaveWeights
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest as SdkHeartbeat

from twinkle.errors import UnknownNameError, UnsupportedError
from twinkle.model.types import AdamParams, FullSpec, LoraSpec
from twinkle.server.types import UNNUMBERED, LoadWeights, OpKind, OptimStep, PublishSampler, Refused, SaveWeights
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.fields import parse
from twinkle.server.wire.requests import (
    ClientConfigRequest,
    CreateFromRequest,
    CreateModelRequest,
    CreateSessionRequest,
    FinishSessionRequest,
    GetInfoRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SessionHeartbeatRequest,
    WeightsInfoRequest,
    names_session,
    to_op,
)
from twinkle.server.wire.sampling import (
    CancelFutureRequest,
    CreateSamplingSessionRequest,
    RetrieveFutureRequest,
)

MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "b"}
PLACE = {"model_id": "s:train:0", "seq_id": 3}


def _dump(request):
    """Return the request as the SDK puts it on the wire."""
    return json.dumps(request.model_dump(exclude_unset=False, exclude_none=True, mode="json")).encode()


def _json(**content):
    return json.dumps(content).encode()


def _payload(request_type, **content):
    op = to_op(request_type, _json(**PLACE, **content))
    assert (op.adapter_id, op.seq, op.kind) == ("s:train:0", 3, request_type.kind)
    return op.payload


def _refusal(request_type, **content):
    payload = _payload(request_type, **content)
    assert isinstance(payload, Refused), payload
    return payload.message


class TestSimpleRequests:
    def test_what_the_sdk_sends(self):
        config = parse(ClientConfigRequest, b'{"sdk_version":"0.36.0"}')
        assert config.sdk_version == "0.36.0"
        session = parse(
            CreateSessionRequest,
            _dump(SdkCreateSession(tags=["a"], user_metadata={"x": [1, {}]}, sdk_version="0.36.0", display_name="d")),
        )
        assert (session.tags, session.user_metadata, session.display_name) == (["a"], {"x": [1, {}]}, "d")
        assert parse(SessionHeartbeatRequest, _dump(SdkHeartbeat(session_id="s"))).session_id == "s"
        assert parse(GetInfoRequest, _dump(SdkGetInfo(model_id="m"))).model_id == "m"
        assert (
            parse(WeightsInfoRequest, b'{"tinker_path":"tinker://r/weights/x"}').tinker_path == "tinker://r/weights/x"
        )
        future = parse(RetrieveFutureRequest, _dump(SdkRetrieveFuture(request_id="r:1", allow_metadata_only=True)))
        assert (future.request_id, future.allow_metadata_only) == ("r:1", True)
        assert parse(CancelFutureRequest, b'{"request_id":"r:1"}').request_id == "r:1"
        finish = parse(FinishSessionRequest, b'{"reason":{"type":"errored"},"detail":null}')
        assert (finish.reason.type, finish.detail) == ("errored", None)
        sampling = parse(
            CreateSamplingSessionRequest,
            _dump(SdkCreateSamplingSession(session_id="s", sampling_session_seq_id=2, base_model="b")),
        )
        assert (sampling.sampling_session_seq_id, sampling.base_model, sampling.model_path) == (2, "b", None)

    def test_unknown_keys_are_ignored(self):
        assert parse(ClientConfigRequest, b'{"sdk_version":"9","new":{"a":1}}').sdk_version == "9"

    @pytest.mark.parametrize(
        ("request_type", "body", "complaint"),
        [
            (CreateSessionRequest, b"", "Invalid JSON"),
            (CreateSessionRequest, b"[]", "object"),
            (CreateSessionRequest, b'{"tags":"a"}', "tags: got 'a'"),
            (CreateSessionRequest, b'{"user_metadata":{"a":NaN}}', "finite numbers"),
            (CreateSessionRequest, b'{"user_metadata":{"a":"\\u0000"}}', "NUL"),
            (CreateSessionRequest, _json(user_metadata={"a": "x" * 70_000}), "16384 bytes"),
            (CreateSessionRequest, _json(user_metadata={str(i): "" for i in range(300)}), "256 entries"),
            (CreateSessionRequest, b'{"display_name":"a\\u0000"}', "NUL"),
            (SessionHeartbeatRequest, b"{}", "session_id: Field required"),
            (SessionHeartbeatRequest, b'{"session_id":7}', "session_id: got 7"),
            (SessionHeartbeatRequest, b'{"session_id":"s","type":"create_session"}', "type: got 'create_session'"),
            (FinishSessionRequest, b'{"reason":{"type":"bored"}}', "reason.type: got 'bored'"),
            (RetrieveFutureRequest, b'{"request_id":""}', "request_id"),
            (RetrieveFutureRequest, b'{"request_id":"r","allow_metadata_only":1}', "allow_metadata_only: got 1"),
            (CreateSamplingSessionRequest, b'{"session_id":"s","sampling_session_seq_id":-1}', "got -1"),
        ],
    )
    def test_refusals(self, request_type, body, complaint):
        with pytest.raises(MalformedRequestError) as caught:
            parse(request_type, body)
        assert complaint in str(caught.value)


class TestCreateModel:
    def test_what_the_sdk_sends(self):
        body = _dump(
            SdkCreateModel(
                session_id="s",
                model_seq_id=1,
                base_model="Qwen/Qwen3-8B",
                lora_config=SdkLoraConfig(rank=8, seed=3, train_mlp=False),
                user_metadata={"renderer_name": "qwen3"},
            )
        )
        request = parse(CreateModelRequest, body)
        assert (request.session_id, request.model_seq_id, request.base_model) == ("s", 1, "Qwen/Qwen3-8B")
        assert request.user_metadata == {"renderer_name": "qwen3"}
        assert request.spec() == LoraSpec(rank=8, seed=3, train_attn=True, train_mlp=False, train_unembed=True)

    @pytest.mark.parametrize(("seed", "signed"), [(2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (-1, -1)])
    def test_seeds_of_64_bits(self, seed, signed):
        request = parse(CreateModelRequest, _json(**MODEL, lora_config={"rank": 8, "seed": seed}))
        assert request.spec().seed == signed

    def test_dimuon_is_refused(self):
        lora = SdkLoraConfig(rank=8)
        config = DimuonOptimizerConfig()
        request = SdkCreateModel(**MODEL, lora_config=lora, optimizer_config=config)
        with pytest.raises(UnsupportedError, match="dimuon"):
            parse(CreateModelRequest, _dump(request)).spec()
        body = _json(**MODEL, lora_config={"rank": 8}, optimizer_config={"type": "x"})
        with pytest.raises(UnknownNameError, match="adamw"):
            parse(CreateModelRequest, body).spec()

    def test_without_lora_all_parameters_are_trained(self):
        assert parse(CreateModelRequest, _json(**MODEL)).spec() == FullSpec()

    @pytest.mark.parametrize(
        ("lora", "complaint"),
        [({"rank": "8"}, "rank: got '8'"), ({"rank": 8, "alpha": 4}, "unknown key 'alpha'; known: rank"), ({}, "rank")],
    )
    def test_bad_lora(self, lora, complaint):
        with pytest.raises(MalformedRequestError, match=complaint):
            parse(CreateModelRequest, _json(**MODEL, lora_config=lora))


class TestSequencedCalls:
    def test_optim_step(self):
        body = _dump(SdkOptimStep(optim_params=tinker.AdamParams(learning_rate=0.5, eps=1e-8), model_id="m", seq_id=2))
        op = to_op(OptimStepRequest, body)
        assert (op.adapter_id, op.seq, op.kind, op.body) == ("m", 2, OpKind.OPTIM_STEP, body)
        assert op.payload == OptimStep(AdamParams(learning_rate=0.5, eps=1e-8))

    def test_other_optimizers(self):
        adam = {"type": "adamw", "learning_rate": 1}
        assert _payload(OptimStepRequest, optimizer_params=adam) == OptimStep(AdamParams(learning_rate=1.0))
        assert _payload(OptimStepRequest, optim_params=adam) == OptimStep(AdamParams(learning_rate=1.0))
        body = _dump(SdkOptimStep(optim_params=DimuonParams(learning_rate=0.1), model_id="m", seq_id=2))
        assert "'dimuon'" in to_op(OptimStepRequest, body).payload.message

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ({}, "adam_params"),
            ({"adam_params": {}, "optim_params": {}}, "2 sets of parameters"),
            ({"adam_params": {"learning_rate": "1"}}, "adam_params.learning_rate: got '1'"),
            ({"adam_params": {"learning_rate": float("nan")}}, "adam_params.learning_rate: got nan"),
            ({"adam_params": {"learning_rate": 10**400}}, "adam_params.learning_rate"),
            ({"adam_params": {"lr": 1.0}}, "unknown key 'lr'; known: beta1"),
            ({"adam_params": {}, "type": "save_weights"}, "type"),
        ],
    )
    def test_bad_optim_steps(self, content, complaint):
        assert complaint in _refusal(OptimStepRequest, **content)

    def test_save(self):
        sent = SdkSaveWeights(
            model_id="m", path="ck-1", seq_id=2**40, ttl_seconds=3600, overwrite=True, user_metadata={"x": "y"}
        )
        op = to_op(SaveWeightsRequest, _dump(sent))
        assert (op.seq, op.payload) == (2**40, SaveWeights("ck-1", 3600, True, {"x": "y"}))
        assert _payload(SaveWeightsRequest, path="a") == SaveWeights("a")

    @pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a b", "ä", "x" * 129, "a\n", "a:b"])
    def test_bad_names(self, name):
        assert "allowed: up to 128" in _refusal(SaveWeightsRequest, path=name)
        assert "allowed: up to 128" in _refusal(SaveWeightsForSamplerRequest, path=name)

    @pytest.mark.parametrize("name", ["a", "000010", "final", "a.b_c-D", "x" * 128, "-", "_."])
    def test_good_names(self, name):
        assert _payload(SaveWeightsRequest, path=name) == SaveWeights(name)

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ({}, "path: Field required"),
            ({"path": None}, "path: got None"),
            ({"path": "a", "ttl_seconds": 0}, "ttl_seconds: got 0"),
            ({"path": "a", "ttl_seconds": 4 * 10**8}, "ttl_seconds: got 400000000"),
            ({"path": "a", "ttl_seconds": 1.5}, "ttl_seconds: got 1.5"),
            ({"path": "a", "overwrite": "yes"}, "overwrite: got 'yes'"),
            ({"path": "a", "user_metadata": {"x": 1}}, "user_metadata.x: got 1"),
            ({"path": "a", "user_metadata": {"x": "y" * 10**6}}, "16384 bytes"),
        ],
    )
    def test_bad_saves(self, content, complaint):
        assert complaint in _refusal(SaveWeightsRequest, **content)

    def test_publish(self):
        named = to_op(SaveWeightsForSamplerRequest, _dump(SdkSaveForSampler(model_id="m", path="s1", seq_id=4)))
        assert (named.kind, named.payload) == (OpKind.PUBLISH, SaveWeights("s1", kind="sampler_weights"))
        unnamed = SdkSaveForSampler(model_id="m", sampling_session_seq_id=0, seq_id=5)
        assert to_op(SaveWeightsForSamplerRequest, _dump(unnamed)).payload == PublishSampler(0)
        assert "one of the two" in _refusal(SaveWeightsForSamplerRequest)
        assert "one of the two" in _refusal(SaveWeightsForSamplerRequest, path="a", sampling_session_seq_id=1)

    def test_load(self):
        path = "tinker://s:train:0/weights/a"
        op = to_op(LoadWeightsRequest, _dump(SdkLoadWeights(model_id="m", seq_id=1, path=path, optimizer=True)))
        assert (op.kind, op.payload) == (OpKind.LOAD, LoadWeights(path, True))
        assert "weights_access_token" in _refusal(
            LoadWeightsRequest, path=path, optimizer=True, weights_access_token="t0"
        )
        assert "t0" not in _refusal(LoadWeightsRequest, path=path, optimizer=True, weights_access_token="t0")
        assert "base_model" in _refusal(LoadWeightsRequest, path=path, optimizer=True, base_model="b")
        assert "session_id" in _refusal(LoadWeightsRequest, path=path, optimizer=True, session_id="s")
        assert "optimizer: Field required" in _refusal(LoadWeightsRequest, path=path)

    def test_load_that_creates(self):
        sent = _dump(SdkLoadWeights(session_id="s", model_seq_id=1, path="tinker://x", optimizer=False))
        assert names_session(sent)
        wanted = parse(CreateFromRequest, sent)
        assert (wanted.session_id, wanted.model_seq_id, wanted.path, wanted.optimizer) == ("s", 1, "tinker://x", False)
        wanted.check()
        assert not names_session(_dump(SdkLoadWeights(model_id="m", seq_id=1, path="tinker://x", optimizer=False)))
        assert not names_session(_json(model_id="m", session_id="s", seq_id=1, path="p", optimizer=True))
        for field, value in (("weights_access_token", "t"), ("optimizer_config", {"type": "dimuon"})):
            with pytest.raises(UnsupportedError, match=field.partition("_")[0]):
                parse(CreateFromRequest, _json(**json.loads(sent), **{field: value})).check()

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"null",
            b"[" * 100_000,
            b"\xff",
            _json(seq_id=1),
            _json(model_id="", seq_id=1),
            _json(model_id="m" * 300, seq_id=1),
            _json(model_id=5, seq_id=1),
            _json(model_id="m", seq_id=0),
            _json(model_id="m", seq_id="1"),
            _json(model_id="m", seq_id=1.0),
            _json(model_id="m", seq_id=True),
            _json(model_id="m", seq_id=2**63),
        ],
    )
    def test_calls_without_a_place(self, body):
        for request_type in (OptimStepRequest, SaveWeightsRequest, SaveWeightsForSamplerRequest, LoadWeightsRequest):
            with pytest.raises(MalformedRequestError):
                to_op(request_type, body)

    @pytest.mark.parametrize("fields", [{}, {"seq_id": None}])
    def test_calls_without_a_number(self, fields):
        """The service numbers them."""
        op = to_op(SaveWeightsRequest, _json(model_id="m", path="a", **fields))
        assert op.seq == UNNUMBERED
        assert not isinstance(op.payload, Refused)

    def test_largest_number(self):
        assert to_op(SaveWeightsRequest, _json(model_id="m", seq_id=2**63 - 1, path="a")).seq == 2**63 - 1
