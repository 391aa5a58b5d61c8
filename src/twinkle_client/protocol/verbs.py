"""Verbs on an adapter.

``seq_id`` numbers the requests of one adapter, 1, 2, …: the server runs them in that order, and the same number with
the same body gets the answer of the first, so that a request may be sent again. Without it requests run as they
arrive. ``inputs`` are InputFeatures or Trajectories, one or a list, or a :class:`BatchReference`.
"""

from typing import Any, Literal

from pydantic import Field

from twinkle_client.protocol.base import OpenWire, Wire

# --- requests ---------------------------------------------------------------------------------------------------------


class BatchReference(Wire):
    """A batch of a dataloader that lives on the server: its rows need not travel. ``number`` counts from 0."""

    kind: Literal["Batch"] = Field(default="Batch", alias="_TWINKLE_TYPE_", serialization_alias="_TWINKLE_TYPE_")
    processor_id: str
    number: int = Field(ge=0)


class CreateRequest(OpenWire):
    pass


class AdapterRequest(OpenWire):
    """calculate_loss, backward, step, zero_grad, lr_step, get_train_configs."""

    adapter_name: str
    seq_id: int | None = Field(default=None, ge=1, lt=2**62)


class AddAdapterRequest(OpenWire):
    """``config``: the fields of PEFT's LoraConfig, as JSON text or as they are."""

    adapter_name: str
    config: str | dict[str, Any] | None = None
    save_dir: str | None = None


class RemoveAdapterRequest(Wire):
    """The adapter leaves the device; its last state is kept as a checkpoint for a while."""

    adapter_name: str


class ForwardRequest(AdapterRequest):
    inputs: Any


class ForwardOnlyRequest(ForwardRequest):
    """Without an adapter (or with an empty name) it is the base model that answers."""

    adapter_name: str | None = None  # type: ignore[assignment]  # the others need one


class GetStateDictRequest(AdapterRequest):
    pass


class SetLossRequest(AdapterRequest):
    loss_cls: str


class SetOptimizerRequest(AdapterRequest):
    optimizer_cls: str


class SetLrSchedulerRequest(AdapterRequest):
    scheduler_cls: str


class SetTemplateRequest(AdapterRequest):
    template_cls: str


class SetProcessorRequest(AdapterRequest):
    processor_cls: str


class AddMetricRequest(AdapterRequest):
    metric_cls: str
    is_training: bool | None = None


class ApplyPatchRequest(AdapterRequest):
    patch_cls: str


class CalculateMetricRequest(AdapterRequest):
    is_training: bool = True


class ClipGradNormRequest(AdapterRequest):
    max_grad_norm: float = 1.0
    norm_type: float = 2.0


class ClipGradAndStepRequest(AdapterRequest):
    max_grad_norm: float = 1.0
    norm_type: float = 2.0


class SaveRequest(AdapterRequest):
    name: str | None = None
    save_optimizer: bool = False
    is_sampler: bool = False
    consumed_train_samples: int = Field(default=0, ge=0)
    interval: int = Field(default=1, ge=1)


class LoadRequest(AdapterRequest):
    name: str
    load_optimizer: bool = False


class ResumeFromCheckpointRequest(AdapterRequest):
    name: str
    resume_only_model: bool = False


class UploadToHubRequest(Wire):
    """``checkpoint_dir``: an address twinkle://…, or what ``save`` returned."""

    checkpoint_dir: str | dict[str, Any]
    hub_model_id: str
    hub_token: str | None = None
    async_upload: bool = True


# --- responses --------------------------------------------------------------------------------------------------------


class OkResponse(Wire):
    status: str = "ok"


class CreateResponse(OkResponse):
    pass


class BackwardResponse(OkResponse):
    pass


class StepResponse(OkResponse):
    pass


class ZeroGradResponse(OkResponse):
    pass


class LrStepResponse(OkResponse):
    pass


class SetLossResponse(OkResponse):
    pass


class SetOptimizerResponse(OkResponse):
    pass


class SetLrSchedulerResponse(OkResponse):
    pass


class SetTemplateResponse(OkResponse):
    pass


class SetProcessorResponse(OkResponse):
    pass


class AddMetricResponse(OkResponse):
    pass


class ApplyPatchResponse(OkResponse):
    pass


class LoadResponse(OkResponse):
    pass


class RemoveAdapterResponse(OkResponse):
    pass


class ClipGradAndStepResponse(OkResponse):
    """``result``: the norm before clipping, where the server says it."""

    result: float | str | None = None


class AddAdapterResponse(OkResponse):
    """``adapter_name``: the id of the adapter's training run."""

    adapter_name: str


class ModelResult(Wire):
    """What any verb that returns something returns."""

    result: Any


class ForwardResponse(Wire):
    """``result``: logps, one row a sequence and aligned with its labels; loss and num_tokens where there is one."""

    result: Any


class ForwardBackwardResponse(Wire):
    """The same; there is a loss."""

    result: Any


class CalculateLossResponse(Wire):
    result: float


class ClipGradNormResponse(Wire):
    """As text; empty within a window of accumulated gradients, where nothing is clipped yet."""

    result: str


class GetTrainConfigsResponse(Wire):
    result: str


class CalculateMetricResponse(Wire):
    result: dict[str, Any]


class GetStateDictResponse(Wire):
    result: dict[str, Any]


class SaveResponse(Wire):
    """``checkpoint_dir`` is the address once more: no directory of the server's is anybody's business."""

    twinkle_path: str
    checkpoint_dir: str | None = None


class TrainingProgressResponse(Wire):
    result: dict[str, int]


class UploadToHubResponse(Wire):
    request_id: str


class UploadStatusResponse(Wire):
    request_id: str
    status: Literal["running", "completed", "failed"]
    error: str | None = None
