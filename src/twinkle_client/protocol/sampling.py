"""Sampling. ``inputs`` are the same as for the model; ``sampling_params`` has the fields of SamplingParams."""

from typing import Any, Literal

from twinkle_client.protocol.base import OkResponse, OpenWire, Wire

StopReason = Literal["length", "stop", "abort", "error"]
TokenLogprobs = list[tuple[int, float]]


class SampleRequest(Wire):
    """A request for samples.

    ``adapter_uri``: sample with the checkpoint at this address, twinkle://…; ``adapter_name``: sample with the current
    weights of an adapter of this session; neither: sample from the base model. ``num_samples`` is used if
    sampling_params does not have it.
    """

    inputs: Any
    sampling_params: dict[str, Any] | None = None
    adapter_name: str | None = ""
    adapter_uri: str | None = None
    num_samples: int | None = None


class SampledSequenceModel(Wire):
    """One sample. ``logprobs``: for each place, (token, log-probability) of the sampled token or of the k likeliest.

    ``routed_experts``: the experts of all tokens but the last, packed as rows of a pass take them, if the request asked
    for them. ``new_input_feature`` has them, too.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    decoded: str | None = None
    new_input_feature: dict[str, Any] | None = None
    routed_experts: Any = None


class SampleResponseModel(Wire):
    sequences: list[SampledSequenceModel]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[TokenLogprobs | None] | None = None


class SampleResponseModelList(Wire):
    samples: list[SampleResponseModel]


class SamplerSetTemplateRequest(OpenWire):
    template_cls: str
    adapter_name: str | None = ""


class SamplerAddAdapterRequest(OpenWire):
    adapter_name: str
    config: Any


class SamplerCreateResponse(OkResponse):
    pass


class SamplerSetTemplateResponse(OkResponse):
    pass


class SamplerAddAdapterResponse(OkResponse):
    adapter_name: str
