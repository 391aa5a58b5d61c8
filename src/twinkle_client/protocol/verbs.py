"""The verbs on an adapter: their requests, their answers, their options, and the table of all verbs.

``seq_id`` numbers the requests of one adapter, 1, 2, …: the server runs them in that order. A request that is sent
again with the same number and the same body gets the answer of the first. Without ``seq_id`` requests run in the order
in which they arrive. ``inputs`` are InputFeatures or Trajectories, one or a list, or a :class:`BatchReference`.

To add a verb, add a line to :data:`VERBS` (and a class for its options, if it has any), a method to the library's
``LoraVerbs``, and a method to the client's ``MultiLoraTransformersModel``. The server needs no change: it calls the
method that has the name of the verb.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetPydanticSchema

from twinkle_client.protocol.answers import DictAnswer, NumberAnswer, TextAnswer
from twinkle_client.protocol.base import OkResponse, OpenWire, Wire

# --- requests ---------------------------------------------------------------------------------------------------------


class BatchReference(Wire):
    """A reference to a batch of a dataloader on the server, instead of the rows. ``number`` counts from 0."""

    # the alias is TYPE_KEY, written as a literal for type checkers
    kind: Literal["Batch"] = Field(default="Batch", alias="_TWINKLE_TYPE_", serialization_alias="_TWINKLE_TYPE_")
    processor_id: str
    number: int = Field(ge=0)


class CreateRequest(OpenWire):
    pass


class AdapterRequest(OpenWire):
    """The fields that the requests of all verbs have; some verbs have no others."""

    adapter_name: str
    seq_id: int | None = Field(default=None, ge=1, lt=2**62)


class AddAdapterRequest(OpenWire):
    """A request to create an adapter. ``config``: the fields of PEFT's LoraConfig, as JSON text or as an object."""

    adapter_name: str
    config: str | dict[str, Any] | None = None
    save_dir: str | None = None


class RemoveAdapterRequest(Wire):
    """A request to end an adapter's run; its last state is kept as a checkpoint for a while."""

    adapter_name: str


class ForwardRequest(AdapterRequest):
    inputs: Any


class ForwardOnlyRequest(ForwardRequest):
    """A request for a forward pass; without an adapter, or with an empty name, the base model answers."""

    adapter_name: str | None = None  # type: ignore[assignment]  # the other verbs need an adapter


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
    """A request to upload a checkpoint. ``checkpoint_dir``: an address twinkle://…, or the answer to ``save``.

    Twinkle's server refuses a ``hub_token`` of None and ignores ``async_upload``.
    """

    checkpoint_dir: str | dict[str, Any]
    hub_model_id: str
    hub_token: str | None = None
    async_upload: bool = True


# --- responses --------------------------------------------------------------------------------------------------------


# Our server answers null to a verb that returns nothing; other servers answer an OkResponse. The client returns the
# class with the verb's name for both.


class CreateResponse(OkResponse):
    """The answer to create. ``train_mode``: what tenants train, adapters (lora) or all parameters (full)."""

    train_mode: Literal["lora", "full"] = "lora"


class AddAdapterResponse(OkResponse):
    """The answer to add_adapter_to_model. ``adapter_name``: the id of the adapter's training run."""

    adapter_name: str


class RemoveAdapterResponse(OkResponse):
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


class ClipGradAndStepResponse(NumberAnswer, OkResponse):
    """The answer to clip_grad_and_step. ``result``: the norm before clipping, if the server sends it."""

    result: float | str | None = None


class ModelResult(Wire):
    """The answer to a verb that returns something, whatever it is."""

    result: Any


class ForwardResponse(DictAnswer):
    """The outputs of a pass: ``logps``, one row per sequence, aligned with its labels; ``loss`` and ``num_tokens`` too,
    if a loss was computed."""


class ForwardBackwardResponse(DictAnswer):
    """The outputs of a pass with a loss; see :class:`ForwardResponse`."""


class CalculateLossResponse(NumberAnswer):
    result: float


class ClipGradNormResponse(NumberAnswer):
    """The norm as text; empty if more backward passes must come before a step: nothing was clipped."""

    result: str


class GetTrainConfigsResponse(TextAnswer):
    result: str

    def __str__(self) -> str:
        return self.result


class CalculateMetricResponse(DictAnswer):
    pass


class GetStateDictResponse(DictAnswer):
    pass


class SaveResponse(TextAnswer):
    """The answer to save, which can be used wherever an address is taken.

    ``checkpoint_dir`` is the address again: the server does not reveal its directories. ``output_dir`` is not part of
    the answer: the client sets it if it has copied the checkpoint to this folder of this machine. ``str`` and
    ``os.fspath`` then return the folder, else the address. Requests always carry the address.
    """

    twinkle_path: str
    checkpoint_dir: str | None = None
    output_dir: str | None = Field(default=None, exclude=True)

    def __str__(self) -> str:
        return self.twinkle_path if self.output_dir is None else self.output_dir

    def __fspath__(self) -> str:
        return str(self)

    def to_wire(self) -> str:
        return self.twinkle_path


class TrainingProgressResponse(DictAnswer):
    """The progress of a checkpoint. ``missing``: state that it does not have, and that starts anew."""

    result: dict[str, int]
    missing: list[str] = Field(default_factory=list, exclude=True)


class UploadToHubResponse(Wire):
    request_id: str


class UploadStatusResponse(Wire):
    request_id: str
    status: Literal["running", "completed", "failed"]
    error: str | None = None


# --- options ----------------------------------------------------------------------------------------------------------
# Keywords of the verbs, which are sent beside the fields of the request. The client leaves out those that are None; the
# server checks them against their types, and refuses a key that is not an option.

Steps = Annotated[int, Field(strict=True, ge=1, le=2**31)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    pass


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The options of ``add_adapter_to_model``. ``seed``: of the initial weights; the server draws one if None."""

    gradient_accumulation_steps: Steps = 1
    seed: Annotated[int, Field(strict=True)] | None = None


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How many backward passes are accumulated for one step, from now on. None: as it was set before."""

    gradient_accumulation_steps: Steps | None = None


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """The options of a pass. ``router_replay_action``: record the experts of each token, or use those of the rows."""

    temperature: Positive = 1.0
    return_logits: Flag = False
    task: str = "causal_lm"
    router_replay_action: Literal["record", "replay_forward"] | None = None


@dataclass(frozen=True, kw_only=True)
class ForwardOnlyOptions(ForwardOptions):
    disable_lora: Flag = False


@dataclass(frozen=True, kw_only=True)
class ForwardBackwardOptions(ForwardOptions):
    gradient_accumulation_steps: Steps | None = None


@dataclass(frozen=True, kw_only=True)
class OptimParams:
    """The settings of the optimizer that a step changes, for this step and all later ones."""

    lr: NotNegative | None = None
    weight_decay: NotNegative | None = None
    eps: Positive | None = None
    betas: Annotated[list[Finite], Field(strict=True, min_length=2, max_length=2)] | None = None


def only_keys_of(options: type[Any]) -> Callable[[object], object]:
    """Return a validator that refuses a mapping with keys that ``options`` does not have."""
    known = sorted(field.name for field in fields(options))

    def check(value: object) -> object:
        unknown = sorted(set(value) - set(known)) if isinstance(value, Mapping) else []
        if unknown:
            raise ValueError(f"unknown key {str(unknown[0])[:120]!r}; known: {', '.join(known)}")
        return value

    return check


# For the client this is any mapping, sent as the script gives it; the server parses it as OptimParams.
SentOptimParams = Annotated[
    Mapping[str, Any],
    GetPydanticSchema(lambda _mapping, schema_of: schema_of(OptimParams)),
    BeforeValidator(only_keys_of(OptimParams)),
]


@dataclass(frozen=True, kw_only=True)
class StepOptions(WindowOptions):
    optim_params: SentOptimParams | None = None


# --- the table --------------------------------------------------------------------------------------------------------

# How the server executes a verb: as a pass without or with gradients, as a save, as a load, or as a method call.
Kind = Literal["forward", "forward_backward", "save", "load", "verb"]


@dataclass(frozen=True)
class Verb:
    """One line of the table of verbs.

    ``options``: the dataclass of the verb's keywords; None if a constructor or a loss decides which keywords it takes.
    """

    request: type[AdapterRequest] = AdapterRequest
    kind: Kind = "verb"
    options: type[Any] | None = NoOptions
    takes_rows: bool = False  # or arguments with a number for each token: its body may be as large as one with rows
    sets_up: bool = False  # it configures the adapter; the server stores its arguments
    steps: bool = False  # it takes a step of the optimizer


VERBS: Mapping[str, Verb] = {
    "forward": Verb(ForwardRequest, "forward", ForwardOptions, takes_rows=True),
    "forward_only": Verb(ForwardOnlyRequest, "forward", ForwardOnlyOptions, takes_rows=True),
    "forward_backward": Verb(ForwardRequest, "forward_backward", ForwardBackwardOptions, takes_rows=True),
    "backward": Verb(kind="forward_backward", options=WindowOptions),
    "calculate_loss": Verb(options=None, takes_rows=True),
    "clip_grad_norm": Verb(ClipGradNormRequest, options=WindowOptions),
    "clip_grad_and_step": Verb(ClipGradAndStepRequest, options=StepOptions, steps=True),
    "step": Verb(options=StepOptions, steps=True),
    "zero_grad": Verb(options=WindowOptions),
    "lr_step": Verb(options=WindowOptions),
    "set_loss": Verb(SetLossRequest, options=None, sets_up=True),
    "set_optimizer": Verb(SetOptimizerRequest, options=None, sets_up=True),
    "set_lr_scheduler": Verb(SetLrSchedulerRequest, options=None, sets_up=True),
    "set_template": Verb(SetTemplateRequest, options=None, sets_up=True),
    "set_processor": Verb(SetProcessorRequest, options=None, sets_up=True),
    "add_metric": Verb(AddMetricRequest, options=None, sets_up=True),
    "apply_patch": Verb(ApplyPatchRequest, options=None),
    "calculate_metric": Verb(CalculateMetricRequest),
    "get_train_configs": Verb(),
    "get_state_dict": Verb(GetStateDictRequest),
    "save": Verb(SaveRequest, "save"),
    "load": Verb(LoadRequest, "load"),
    "resume_from_checkpoint": Verb(ResumeFromCheckpointRequest, "load"),
}
