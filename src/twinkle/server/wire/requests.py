"""The JSON requests of the Tinker protocol, and how they become the service's nouns.

JSON types are taken strictly: ``"1"`` and ``1.0`` are not integers. Keys of a request that we do not know are ignored,
because a newer SDK may send more of them; keys that we know and do not offer are refused unless they are at their
default. Inside ``adam_params``, ``lora_config`` and ``sampling_params`` unknown keys are refused: ignoring one would
train or sample otherwise than asked. Those about samples are in :mod:`twinkle.server.wire.sample_requests`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.model.adam_params import check_adam_params
from twinkle.model.types import AdamParams, LoraSpec
from twinkle.server.types import (
    LoadWeights,
    Op,
    OpKind,
    OptimStep,
    Payload,
    PublishSampler,
    Refused,
    SaveWeights,
)
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.fields import (
    AnyMetadata,
    CheckpointName,
    Id,
    Label,
    LongText,
    Metadata,
    Number,
    Parameters,
    Request,
    Seed,
    SequenceNumber,
    Tags,
    Text,
    TimeToLive,
    parse,
)

_KEPT_DETAIL = 4096  # characters
MAX_TELEMETRY_BYTES = 4 * 2**20


# --- sessions and the rest --------------------------------------------------------------------------------------------


class ClientConfigRequest(Request):
    """Of client/config and of client/dynamic_config."""

    sdk_version: Text = ""


class CreateSessionRequest(Request):
    tags: Annotated[Tags, Field(default_factory=list)]
    user_metadata: AnyMetadata | None = None
    sdk_version: Label = ""
    project_id: Label | None = None
    display_name: Annotated[Text, Field(max_length=1024)] | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(Request):
    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


def _beginning(text: str) -> str:
    """Return as much of a text as is kept with a session."""
    return text if len(text) <= _KEPT_DETAIL else text[: _KEPT_DETAIL - 1] + "…"


class FinishReason(Request):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Request):
    reason: FinishReason
    detail: Annotated[LongText, AfterValidator(_beginning)] | None = None  # often a whole traceback


class GetInfoRequest(Request):
    model_id: Id
    type: Literal["get_info"] = "get_info"


class UnloadModelRequest(Request):
    model_id: Id
    type: Literal["unload_model"] = "unload_model"


class WeightsInfoRequest(Request):
    tinker_path: Text


# --- create_model -----------------------------------------------------------------------------------------------------


class LoraConfig(Parameters):
    rank: Number
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Request):
    """Chosen once, when the model is created."""

    type: str = "adamw"


class CreateModelRequest(Request):
    session_id: Id
    model_seq_id: Number
    base_model: Annotated[Text, Field(min_length=1)]
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    type: Literal["create_model"] = "create_model"

    def spec(self) -> LoraSpec:
        if self.lora_config is None:
            raise UnsupportedError(
                "lora_config: got null, allowed: a LoRA configuration (only adapters are trained here)"
            )
        check_optimizer(self.optimizer_config)
        lora = self.lora_config
        seed = lora.seed
        if seed is not None and seed >= 2**63:
            seed -= 2**64  # the same 64 bits, read with a sign as the trainer does
        return LoraSpec(
            rank=lora.rank,
            seed=seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
        )


def check_optimizer(config: OptimizerConfig | None) -> None:
    if config is not None and config.type == "dimuon":
        raise UnsupportedError("optimizer type: got 'dimuon', allowed: 'adamw' (dimuon is not implemented)")
    if config is not None and config.type != "adamw":
        raise UnknownNameError("optimizer type", config.type, ["adamw"])


def check_access_token(token: object) -> None:
    if token is not None:
        raise UnsupportedError("weights_access_token: got a token, allowed: null (own and public checkpoints only)")


# --- calls with a place in a model's sequence -------------------------------------------------------------------------


class SequencedRequest(Request):
    """A call whose number is used up even when something else in it is wrong."""

    kind: ClassVar[OpKind]
    model_id: Id
    seq_id: SequenceNumber

    def payload(self) -> Payload:
        raise NotImplementedError


class AdamConfig(Parameters):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    type: Literal["adamw"] = "adamw"

    def params(self) -> AdamParams:
        params = AdamParams(**self.model_dump(exclude={"type"}))
        check_adam_params(params)
        return params


class OptimStepRequest(SequencedRequest):
    """The SDK writes Adam's parameters as ``adam_params`` and other optimizers' as ``optimizer_params``."""

    kind: ClassVar = OpKind.OPTIM_STEP
    adam_params: AdamConfig | None = None
    optim_params: AdamConfig | None = None
    optimizer_params: AdamConfig | None = None
    type: Literal["optim_step"] = "optim_step"

    def payload(self) -> OptimStep:
        given = [x for x in (self.adam_params, self.optim_params, self.optimizer_params) if x is not None]
        if len(given) != 1:
            raise InvalidInputError("adam_params", f"{len(given)} sets of parameters", "one")
        return OptimStep(given[0].params())


class SaveWeightsRequest(SequencedRequest):
    kind: ClassVar = OpKind.SAVE
    path: CheckpointName
    ttl_seconds: TimeToLive | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"

    def payload(self) -> SaveWeights:
        return SaveWeights(self.path, self.ttl_seconds, self.overwrite, self.user_metadata or {})


class SaveWeightsForSamplerRequest(SequencedRequest):
    """Named by ``path``, or unnamed with the number of a sampling session."""

    kind: ClassVar = OpKind.PUBLISH
    path: CheckpointName | None = None
    sampling_session_seq_id: Number | None = None
    ttl_seconds: TimeToLive | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    def payload(self) -> PublishSampler:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            given = f"{self.path!r} and {self.sampling_session_seq_id!r}"
            raise InvalidInputError("path and sampling_session_seq_id", given, "one of the two")
        return PublishSampler(self.path, self.sampling_session_seq_id, self.ttl_seconds, self.user_metadata or {})


class LoadWeightsRequest(SequencedRequest):
    kind: ClassVar = OpKind.LOAD
    path: Annotated[Text, Field(min_length=1)]
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    # Known, and refused unless they are null:
    weights_access_token: Any = None
    base_model: Any = None
    user_metadata: Any = None
    session_id: Any = None
    model_seq_id: Any = None
    type: Literal["load_weights"] = "load_weights"

    def payload(self) -> LoadWeights:
        check_access_token(self.weights_access_token)
        for field in ("base_model", "model_seq_id", "session_id", "user_metadata"):
            if vars(self)[field] is not None:
                raise InvalidInputError(field, vars(self)[field], "null: the model exists already")
        check_optimizer(self.optimizer_config)
        return LoadWeights(self.path, self.optimizer)


class _Place(Request):
    """The part of a sequenced call that must be readable."""

    model_id: Id | None = None
    seq_id: SequenceNumber | None = None


def to_op(request_type: type[SequencedRequest], body: bytes) -> Op:
    """Read one of the sequenced calls above.

    Without a readable model_id and seq_id it raises :class:`MalformedRequestError`; whatever else is wrong makes the op
    :class:`Refused`, so that the model's sequence goes on.
    """
    place = parse(_Place, body)
    if place.model_id is None or place.seq_id is None:
        raise MalformedRequestError(f"{'model_id' if place.model_id is None else 'seq_id'}: Field required")
    payload: Payload
    try:
        payload = parse(request_type, body).payload()
    except UserError as error:
        payload = Refused(str(error))
    return Op(place.model_id, place.seq_id, request_type.kind, payload, body)
