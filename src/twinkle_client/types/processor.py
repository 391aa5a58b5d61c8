"""Datasets, dataloaders, templates, preprocessors and rewards that live on the server.

Arguments that are ``pid:…`` mean the object of that id; DatasetMeta travels as JSON text.
"""

from typing import Any, Literal

from twinkle_client.protocol.base import OpenWire, Wire

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
    """For programs that name it: processors live as long as their session, and no route takes this."""

    processor_id: str


class ProcessorHeartbeatResponse(Wire):
    status: str = "ok"
