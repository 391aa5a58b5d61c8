"""Verbs on an adapter: what each is asked with, what it answers, and the table of all.

``seq_id`` numbers the requests of one adapter, 1, 2, …: the server runs them in that order, and the same number with
the same body gets the answer of the first, so that a request may be sent again. Without it requests run as they
arrive. ``inputs`` are InputFeatures or Trajectories, one or a list, or a :class:`BatchReference`.

A new verb is a line of :data:`VERBS` (with options of its own, if it has some), a method of the library's
``LoraVerbs``, and a method of the client's ``MultiLoraTransformersModel``. The server needs no change: it calls the
method that has the name of the verb.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetPydanticSchema

from twinkle_client.protocol.base import OkResponse, OpenWire, Wire

# --- requests ---------------------------------------------------------------------------------------------------------


class BatchReference(Wire):
    """A batch of a dataloader that lives on the server: its rows need not travel. ``number`` counts from 0."""

    # TYPE_KEY, which type checkers want as a literal
    kind: Literal["Batch"] = Field(default="Batch", alias="_TWINKLE_TYPE_", serialization_alias="_TWINKLE_TYPE_")
    processor_id: str
    number: int = Field(ge=0)


class CreateRequest(OpenWire):
    pass


class AdapterRequest(OpenWire):
    """What every verb is asked with, and all that some are."""

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


# A verb that returns nothing answers null; other servers answer an OkResponse.


class ClipGradAndStepResponse(OkResponse):
    """``result``: the norm before clipping, where the server says it."""

    result: float | str | None = None


class AddAdapterResponse(OkResponse):
    """``adapter_name``: the id of the adapter's training run."""

    adapter_name: str


class ModelResult(Wire):
    """What any verb that returns something returns.

    Of a pass: logps, one row a sequence and aligned with its labels; loss and num_tokens where there is a loss.
    """

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


# --- options ----------------------------------------------------------------------------------------------------------
# Keywords of the verbs themselves, which travel beside the fields of the request. The client fills them in and leaves
# out what is None; the server checks them against their types, and refuses a key that no option has.

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
    """Of ``add_adapter_to_model``. ``seed``: of the first weights; the server draws one where it is None."""

    gradient_accumulation_steps: Steps = 1
    seed: Annotated[int, Field(strict=True)] | None = None


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Of verbs that count gradients. None: as the adapter was added."""

    gradient_accumulation_steps: Steps | None = None


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    temperature: Positive = 1.0
    return_logits: Flag = False
    task: str = "causal_lm"


@dataclass(frozen=True, kw_only=True)
class ForwardOnlyOptions(ForwardOptions):
    disable_lora: Flag = False


@dataclass(frozen=True, kw_only=True)
class ForwardBackwardOptions(ForwardOptions):
    gradient_accumulation_steps: Steps | None = None


@dataclass(frozen=True, kw_only=True)
class OptimParams:
    """What a step changes of the optimizer, for this step and those after it."""

    lr: NotNegative | None = None
    weight_decay: NotNegative | None = None
    eps: Positive | None = None
    betas: Annotated[list[Finite], Field(strict=True, min_length=2, max_length=2)] | None = None


def only_keys_of(options: type[Any]) -> Callable[[object], object]:
    """A check, before a mapping is read as ``options``, that it has no other keys."""
    known = sorted(field.name for field in fields(options))

    def check(value: object) -> object:
        unknown = sorted(set(value) - set(known)) if isinstance(value, Mapping) else []
        if unknown:
            raise ValueError(f"unknown key {str(unknown[0])[:120]!r}; known: {', '.join(known)}")
        return value

    return check


# A mapping for the client, which sends what a script gives it; the server reads it as OptimParams.
SentOptimParams = Annotated[
    Mapping[str, Any],
    GetPydanticSchema(lambda _mapping, schema_of: schema_of(OptimParams)),
    BeforeValidator(only_keys_of(OptimParams)),
]


@dataclass(frozen=True, kw_only=True)
class StepOptions(WindowOptions):
    optim_params: SentOptimParams | None = None


# --- the table --------------------------------------------------------------------------------------------------------

# What the server makes of a verb: a pass of the model without or with gradients, a file, or a call of a method.
Kind = Literal["forward", "forward_backward", "save", "load", "verb"]


@dataclass(frozen=True)
class Verb:
    """``options``: a dataclass; None where a constructor or a loss knows the names of the keywords."""

    request: type[AdapterRequest] = AdapterRequest
    kind: Kind = "verb"
    options: type[Any] | None = NoOptions
    takes_rows: bool = False  # or arguments with a number for each of their tokens
    sets_up: bool = False  # it chooses something that the server then keeps
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
