"""The JSON requests about checkpoints beyond saving and loading: exporting, beginning from one, copying, expiry."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from twinkle.server.state.files.export import check_recipients
from twinkle.server.types import ExportWeights, OpKind
from twinkle.server.wire.fields import CheckpointName, Id, Metadata, Number, Request, Text, TimeToLive, parse
from twinkle.server.wire.requests import OptimizerConfig, SequencedRequest, check_access_token, check_optimizer

_RECIPIENTS = "age_encryption_recipients"
Address = Annotated[Text, Field(min_length=1)]


class SaveWeightsExternalRequest(SequencedRequest):
    kind: ClassVar = OpKind.EXPORT
    path: CheckpointName
    ttl_seconds: TimeToLive | None = None
    age_encryption_recipients: list[Text] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"

    def payload(self) -> ExportWeights:
        if self.age_encryption_recipients is not None:
            check_recipients(self.age_encryption_recipients, _RECIPIENTS)
        return ExportWeights(self.path, self.ttl_seconds, tuple(self.age_encryption_recipients or ()))


class CreateFromRequest(Request):
    """load_weights that names a session: the model does not exist yet, and the checkpoint says what it is like."""

    session_id: Id
    model_seq_id: Number
    path: Address
    optimizer: bool
    base_model: Annotated[Text, Field(min_length=1)] | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Any = None
    type: Literal["load_weights"] = "load_weights"

    def check(self) -> None:
        """Raises for what is known and not offered."""
        check_access_token(self.weights_access_token)
        check_optimizer(self.optimizer_config)


class _Addressing(Request):
    model_id: Any = None
    session_id: Any = None


def names_session(body: bytes) -> bool:
    """Whether a load_weights is to create its model. One that names both is about a model that exists, and wrong."""
    addressing = parse(_Addressing, body)
    return addressing.model_id is None and addressing.session_id is not None


class CopyWeightsRequest(Request):
    source_path: Address
    destination_project_id: Annotated[Text, Field(min_length=1)] | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    ttl_seconds: TimeToLive | None = None
    weights_access_token: Any = None


class SetTtlRequest(Request):
    """null: for ever. The field itself must be there."""

    ttl_seconds: TimeToLive | None
