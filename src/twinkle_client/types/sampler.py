"""Compatibility path: the types of sampling; see :mod:`twinkle_client.protocol.sampling`."""

from twinkle_client.protocol.sampling import (
    SampledSequenceModel,
    SamplerAddAdapterRequest,
    SamplerAddAdapterResponse,
    SamplerCreateResponse,
    SampleRequest,
    SampleResponseModel,
    SampleResponseModelList,
    SamplerSetTemplateRequest,
    SamplerSetTemplateResponse,
    StopReason,
)

__all__ = [
    "SampleRequest",
    "SampleResponseModel",
    "SampleResponseModelList",
    "SampledSequenceModel",
    "SamplerAddAdapterRequest",
    "SamplerAddAdapterResponse",
    "SamplerCreateResponse",
    "SamplerSetTemplateRequest",
    "SamplerSetTemplateResponse",
    "StopReason",
]
