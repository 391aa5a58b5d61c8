"""Compatibility path: the bodies of verbs; see :mod:`twinkle_client.protocol.verbs`."""

from twinkle_client.protocol.base import OkResponse
from twinkle_client.protocol.verbs import (
    AdapterRequest,
    AddAdapterRequest,
    AddAdapterResponse,
    AddMetricRequest,
    ApplyPatchRequest,
    BatchReference,
    CalculateLossResponse,
    CalculateMetricRequest,
    CalculateMetricResponse,
    ClipGradAndStepRequest,
    ClipGradAndStepResponse,
    ClipGradNormRequest,
    ClipGradNormResponse,
    CreateRequest,
    ForwardOnlyRequest,
    ForwardRequest,
    GetStateDictRequest,
    GetStateDictResponse,
    GetTrainConfigsResponse,
    LoadRequest,
    ModelResult,
    RemoveAdapterRequest,
    ResumeFromCheckpointRequest,
    SaveRequest,
    SaveResponse,
    SetLossRequest,
    SetLrSchedulerRequest,
    SetOptimizerRequest,
    SetProcessorRequest,
    SetTemplateRequest,
    TrainingProgressResponse,
    UploadStatusResponse,
    UploadToHubRequest,
    UploadToHubResponse,
)

# Answers with the same fields have one class; scripts use these names of it.
AddMetricResponse = OkResponse
ApplyPatchResponse = OkResponse
BackwardResponse = OkResponse
CreateResponse = OkResponse
ForwardBackwardResponse = ModelResult
ForwardResponse = ModelResult
LoadResponse = OkResponse
LrStepResponse = OkResponse
RemoveAdapterResponse = OkResponse
SetLossResponse = OkResponse
SetLrSchedulerResponse = OkResponse
SetOptimizerResponse = OkResponse
SetProcessorResponse = OkResponse
SetTemplateResponse = OkResponse
StepResponse = OkResponse
ZeroGradResponse = OkResponse

__all__ = [
    "AdapterRequest",
    "AddAdapterRequest",
    "AddAdapterResponse",
    "AddMetricRequest",
    "AddMetricResponse",
    "ApplyPatchRequest",
    "ApplyPatchResponse",
    "BackwardResponse",
    "BatchReference",
    "CalculateLossResponse",
    "CalculateMetricRequest",
    "CalculateMetricResponse",
    "ClipGradAndStepRequest",
    "ClipGradAndStepResponse",
    "ClipGradNormRequest",
    "ClipGradNormResponse",
    "CreateRequest",
    "CreateResponse",
    "ForwardBackwardResponse",
    "ForwardOnlyRequest",
    "ForwardRequest",
    "ForwardResponse",
    "GetStateDictRequest",
    "GetStateDictResponse",
    "GetTrainConfigsResponse",
    "LoadRequest",
    "LoadResponse",
    "LrStepResponse",
    "ModelResult",
    "OkResponse",
    "RemoveAdapterRequest",
    "RemoveAdapterResponse",
    "ResumeFromCheckpointRequest",
    "SaveRequest",
    "SaveResponse",
    "SetLossRequest",
    "SetLossResponse",
    "SetLrSchedulerRequest",
    "SetLrSchedulerResponse",
    "SetOptimizerRequest",
    "SetOptimizerResponse",
    "SetProcessorRequest",
    "SetProcessorResponse",
    "SetTemplateRequest",
    "SetTemplateResponse",
    "StepResponse",
    "TrainingProgressResponse",
    "UploadStatusResponse",
    "UploadToHubRequest",
    "UploadToHubResponse",
    "ZeroGradResponse",
]
