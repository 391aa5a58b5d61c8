"""The JSON requests of the Tinker protocol, and their conversion to the services' dataclasses.

JSON types are strict: ``"1"`` and ``1.0`` are not integers. Unknown keys of a request are ignored, because a newer SDK
may send more of them; known keys that this server does not support are refused unless they have their default (except
``record_stability_info`` of samples, which is ignored). Inside
``adam_params``, ``lora_config`` and ``sampling_params`` unknown keys are refused, because ignoring one would train or
sample differently from what the client asked. The requests for samples are in :mod:`twinkle.server.wire.sampling`.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AwareDatetime, Field

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.model.types import AdamParams, FullSpec, LoraSpec, TrainingSpec, check_adam_params
from twinkle.server.state.files.export import check_recipients
from twinkle.server.types import (
    UNNUMBERED,
    LoadWeights,
    Op,
    OpKind,
    OptimStep,
    Payload,
    PublishSampler,
    Refused,
    SaveWeights,
)
from twinkle.server.types import FinishReason as Reason
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
    Sequenced,
    Tags,
    Text,
    TimeToLive,
    parse,
)

Name = Annotated[Text, Field(min_length=1)]  # the name of a model or project, or the path of a checkpoint
_KEPT_DETAIL = 4096  # characters of a finish detail that are stored
MAX_TELEMETRY_BYTES = 4 * 2**20


# --- sessions and the rest --------------------------------------------------------------------------------------------


class ClientConfigRequest(Request):
    """The request of client/config and of client/dynamic_config."""

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
    """Return the beginning of a text, as long as is stored with a session."""
    return text if len(text) <= _KEPT_DETAIL else text[: _KEPT_DETAIL - 1] + "…"


class FinishReason(Request):
    type: Reason


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


# --- searching sessions -----------------------------------------------------------------------------------------------


class AssignProjectRequest(Request):
    project_id: Annotated[Label, Field(min_length=1)]


class Owner(Request):
    """Whose sessions to search. A tenant finds only its own. ``owner_urns``: tenant ids, as session summaries show."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Text], Field(max_length=10)] | None = None


class Status(Request):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[Reason], Field(min_length=1)] | None = None


class SearchCursor(Request):
    """The last session of the page before. ``last_created_at`` is text in JSON, so it is not read strictly."""

    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_session_id: Id


class SearchSessionsRequest(Request):
    session_id: Id | None = None
    project_ids: Annotated[list[Text], Field(max_length=100)] | None = None
    user_metadata: Annotated[Metadata, Field(default_factory=dict)]
    display_name: Name | None = None
    owner: Annotated[Owner, Field(default_factory=Owner)]
    statuses: Annotated[list[Status], Field(min_length=1, max_length=10)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


# --- create_model -----------------------------------------------------------------------------------------------------


class LoraConfig(Parameters):
    rank: Number
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Request):
    """The optimizer of a model. :func:`check_optimizer` accepts only ``adamw``."""

    type: str = "adamw"


class CreateModelRequest(Request):
    session_id: Id
    model_seq_id: Number
    base_model: Name
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    type: Literal["create_model"] = "create_model"

    def spec(self) -> TrainingSpec:
        """Return what to train: an adapter, or all parameters if the request has no LoRA configuration.

        UserError for an optimizer that this server does not have.
        """
        check_optimizer(self.optimizer_config)
        if self.lora_config is None:
            return FullSpec()
        spec = LoraSpec(**self.lora_config.model_dump())
        if spec.seed is not None and spec.seed >= 2**63:
            return replace(spec, seed=spec.seed - 2**64)  # the same 64 bits, signed, as the trainer reads them
        return spec


def check_optimizer(config: OptimizerConfig | None) -> None:
    if config is not None and config.type == "dimuon":
        raise UnsupportedError("optimizer type: got 'dimuon', allowed: 'adamw' (dimuon is not implemented)")
    if config is not None and config.type != "adamw":
        raise UnknownNameError("optimizer type", config.type, ["adamw"])


def check_access_token(token: object) -> None:
    if token is not None:
        raise UnsupportedError("weights_access_token: got a token, allowed: null (own and public checkpoints only)")


# --- ops: requests with a sequence number of a model ------------------------------------------------------------------


class SequencedRequest(Sequenced):
    """The base class of JSON requests that become ops; ``kind``: the kind of op."""

    kind: ClassVar[OpKind]

    def payload(self) -> Payload:
        """Return what the op is to do; UserError if the fields do not fit together."""
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
    """An optimizer step. Exactly one of the three fields must hold parameters, and all take Adam's.

    The SDK sends Adam's parameters as ``adam_params``, and those of other optimizers in the other two.
    """

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
    """Save weights for sampling: as a checkpoint called ``path``, or unnamed, with the number of a sampling session."""

    kind: ClassVar = OpKind.PUBLISH
    path: CheckpointName | None = None
    sampling_session_seq_id: Number | None = None
    ttl_seconds: TimeToLive | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    def payload(self) -> SaveWeights | PublishSampler:
        if self.path is None and self.sampling_session_seq_id is not None:
            return PublishSampler(self.sampling_session_seq_id)
        if self.path is None or self.sampling_session_seq_id is not None:
            given = f"{self.path!r} and {self.sampling_session_seq_id!r}"
            raise InvalidInputError("path and sampling_session_seq_id", given, "one of the two")
        return SaveWeights(self.path, self.ttl_seconds, False, self.user_metadata or {}, "sampler_weights")


class SaveWeightsExternalRequest(SequencedRequest):
    kind: ClassVar = OpKind.EXPORT
    path: CheckpointName
    ttl_seconds: TimeToLive | None = None
    age_encryption_recipients: list[Text] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"

    def payload(self) -> SaveWeights:
        if self.age_encryption_recipients is not None:
            check_recipients(self.age_encryption_recipients, "age_encryption_recipients")
        recipients = tuple(self.age_encryption_recipients or ())
        return SaveWeights(self.path, self.ttl_seconds, kind="external_weights", recipients=recipients)


class LoadWeightsRequest(SequencedRequest):
    kind: ClassVar = OpKind.LOAD
    path: Name
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    # Fields of the protocol that are refused here unless they are null:
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


def to_op(request_type: type[SequencedRequest], body: bytes) -> Op:
    """Return the op in ``body``, a request of the type ``request_type``.

    :class:`MalformedRequestError` without a valid model_id, or with a wrong seq_id. With any other mistake the op's
    payload is :class:`Refused`: the op fails, but its sequence number is used up, so that the ops after it can run.
    """
    place = parse(Sequenced, body)
    payload: Payload
    try:
        payload = parse(request_type, body).payload()
    except UserError as error:
        payload = Refused(str(error))
    return Op(place.model_id, place.seq_id or UNNUMBERED, request_type.kind, payload, body)


# --- checkpoints: creating a model from one, copying, expiry ----------------------------------------------------------


class CreateFromRequest(Request):
    """A load_weights that names a session: it creates a model, with the LoRA configuration of the checkpoint's run."""

    session_id: Id
    model_seq_id: Number
    path: Name
    optimizer: bool
    base_model: Name | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Any = None
    type: Literal["load_weights"] = "load_weights"

    def check(self) -> None:
        """Raise UserError for an access token, or for an optimizer that this server does not have."""
        check_access_token(self.weights_access_token)
        check_optimizer(self.optimizer_config)


class _Addressed(Request):
    model_id: Any = None
    session_id: Any = None


def names_session(body: bytes) -> bool:
    """Return whether a load_weights is to create its model, because it names a session and no model.

    A request that names both concerns an existing model, and :meth:`LoadWeightsRequest.payload` refuses it.
    """
    addressing = parse(_Addressed, body)
    return addressing.model_id is None and addressing.session_id is not None


class CopyWeightsRequest(Request):
    source_path: Name
    destination_project_id: Name | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    ttl_seconds: TimeToLive | None = None
    weights_access_token: Any = None


class SetTtlRequest(Request):
    """A new time to live of a checkpoint. null: it never expires. The field must be present."""

    ttl_seconds: TimeToLive | None
