"""Sessions, a server's reports about itself, and the objects (processors) that belong to a session."""

from typing import Any, Literal

from twinkle_client.protocol.base import OkResponse, OpenWire, Wire

# --- sessions and their heartbeats ------------------------------------------------------------------------------------


class CreateSessionRequest(Wire):
    metadata: dict[str, Any] | None = None


class CreateSessionResponse(Wire):
    session_id: str


class SessionHeartbeatRequest(Wire):
    session_id: str


class SessionHeartbeatResponse(Wire):
    pass


class FinishSessionRequest(Wire):
    """A request to end a session: its adapters leave the device and are kept as checkpoints; its processors end."""

    session_id: str


class FinishSessionResponse(Wire):
    pass


# --- the server -------------------------------------------------------------------------------------------------------


class SupportedModel(Wire):
    model_name: str


class GetServerCapabilitiesResponse(Wire):
    supported_models: list[SupportedModel]


class ModelInfoResponse(Wire):
    """The answer to a model's ``get_info``. ``model_folder`` is told only to clients on the server's own machine."""

    model_name: str
    architecture: str
    max_context_length: int
    model_folder: str | None = None


class HealthResponse(Wire):
    status: str


class DeepHealthResponse(Wire):
    healthy: bool
    models: dict[str, dict[str, Any]]


class CapacityInfoResponse(Wire):
    """How many adapters the tenant may have (max), has (used), and may still create (free)."""

    max_loras: int
    used_loras: int
    free_loras: int


class ServerWeightsInfoResponse(Wire):
    """Kept for programs that import this name: ``weights_info`` answers with a :class:`WeightsInfoResponse`."""

    weights_info: Any


# --- processors: datasets, dataloaders, templates, preprocessors and rewards on the server ----------------------------
# An argument ``pid:…`` refers to the object with that id; a DatasetMeta is sent as JSON text.

ProcessorType = Literal["dataset", "dataloader", "preprocessor", "processor", "reward", "template", "weight_loader"]


class ProcessorCreateRequest(OpenWire):
    processor_type: str
    class_type: str


class ProcessorCreateResponse(Wire):
    processor_id: str


class ProcessorCallRequest(OpenWire):
    processor_id: str
    function: str


class ProcessorCallResponse(Wire):
    result: Any = None


class ProcessorHeartbeatRequest(Wire):
    """A heartbeat of the session that has this processor. Processors live as long as their session."""

    processor_id: str


class ProcessorHeartbeatResponse(OkResponse):
    pass
