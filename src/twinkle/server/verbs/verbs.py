"""The verbs: what each is asked with, and what it becomes on the way to the device."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.server.ids import CHECKPOINT_NAME
from twinkle.server.types import Native, NativeLoad, NativePass, NativeSave, NativeVerb, OpKind
from twinkle.server.verbs.features import Row
from twinkle.server.verbs.settings import check_small
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.fields import Parameters, check
from twinkle_client import types

NO_ADAPTER = ""  # what stands for the base model where an adapter's id is expected
_PLUGIN = re.compile(r"[a-z]+://")


class _Window(Parameters):
    gradient_accumulation_steps: int | None = Field(default=None, ge=1, le=2**31)


class _Forward(Parameters):
    temperature: float = Field(default=1.0, gt=0)
    return_logits: bool = False
    task: str = "causal_lm"


class _ForwardOnly(_Forward):
    disable_lora: bool = False


class _ForwardBackward(_Forward, _Window):
    pass


class _OptimParams(Parameters):
    lr: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)
    eps: float | None = Field(default=None, gt=0)
    betas: list[float] | None = Field(default=None, min_length=2, max_length=2)


class _Step(_Window):
    optim_params: _OptimParams | None = None


class _Nothing(Parameters):
    pass


@dataclass(frozen=True)
class Verb:
    """``options``: the keywords of the verb itself; None where a constructor or a loss knows the others."""

    request: type[types.AdapterRequest]
    kind: OpKind = OpKind.VERB
    options: type[Parameters] | None = _Nothing
    takes_rows: bool = False  # or arguments with a number for each of their tokens


VERBS: Mapping[str, Verb] = {
    "forward": Verb(types.ForwardRequest, OpKind.FORWARD, _Forward, takes_rows=True),
    "forward_only": Verb(types.ForwardOnlyRequest, OpKind.FORWARD, _ForwardOnly, takes_rows=True),
    "forward_backward": Verb(types.ForwardRequest, OpKind.FORWARD_BACKWARD, _ForwardBackward, takes_rows=True),
    "backward": Verb(types.AdapterRequest, OpKind.FORWARD_BACKWARD, _Window),
    "calculate_loss": Verb(types.AdapterRequest, options=None, takes_rows=True),
    "clip_grad_norm": Verb(types.ClipGradNormRequest, options=_Window),
    "clip_grad_and_step": Verb(types.ClipGradAndStepRequest, options=_Step),
    "step": Verb(types.AdapterRequest, options=_Step),
    "zero_grad": Verb(types.AdapterRequest, options=_Window),
    "lr_step": Verb(types.AdapterRequest, options=_Window),
    "set_loss": Verb(types.SetLossRequest, options=None),
    "set_optimizer": Verb(types.SetOptimizerRequest, options=None),
    "set_lr_scheduler": Verb(types.SetLrSchedulerRequest, options=None),
    "set_template": Verb(types.SetTemplateRequest, options=None),
    "set_processor": Verb(types.SetProcessorRequest, options=None),
    "add_metric": Verb(types.AddMetricRequest, options=None),
    "apply_patch": Verb(types.ApplyPatchRequest, options=None),
    "calculate_metric": Verb(types.CalculateMetricRequest),
    "get_train_configs": Verb(types.AdapterRequest),
    "get_state_dict": Verb(types.GetStateDictRequest),
    "save": Verb(types.SaveRequest, OpKind.SAVE),
    "load": Verb(types.LoadRequest, OpKind.LOAD),
    "resume_from_checkpoint": Verb(types.ResumeFromCheckpointRequest, OpKind.LOAD),
}

# They choose something that the server then keeps.
SET_UP = ("set_loss", "set_optimizer", "set_lr_scheduler", "set_template", "set_processor", "add_metric")
# Names of classes: those of the library, never code from elsewhere.
_CLASS_NAMES = ("loss_cls", "optimizer_cls", "scheduler_cls", "template_cls", "processor_cls", "metric_cls")
_COMMON = ("adapter_name", "seq_id")


def verb_named(name: str) -> Verb:
    if name not in VERBS:
        raise UnknownNameError("verb", name, VERBS)
    return VERBS[name]


def payload_of(name: str, request: types.AdapterRequest, rows: tuple[Row, ...] = ()) -> Native:
    """``rows``: the inputs of a pass, as they are to be trained on."""
    verb = verb_named(name)
    if verb.kind.is_pass:
        options, rest = _options(verb, request.arguments)
        if rest and name == "backward":
            raise UnknownNameError("argument of backward", min(rest), _names(verb))
        return NativePass(name, rows, options, rest)
    if isinstance(request, types.SaveRequest):
        _refuse(name, request.arguments)
        return _save(request)
    if isinstance(request, types.LoadRequest):
        _refuse(name, request.arguments)
        return NativeLoad("load", request.name, request.load_optimizer)
    if isinstance(request, types.ResumeFromCheckpointRequest):
        _refuse(name, request.arguments)
        return NativeLoad("resume_from_checkpoint", request.name, not request.resume_only_model)
    if isinstance(request, types.ApplyPatchRequest):
        raise UnsupportedError(f"apply_patch: {request.patch_cls!r}: code of the served model is not patched")
    return NativeVerb(name, _arguments(name, verb, request))


def _arguments(name: str, verb: Verb, request: types.AdapterRequest) -> dict[str, object]:
    declared = {key: value for key, value in request.model_dump().items() if key in type(request).model_fields}
    arguments = {key: value for key, value in declared.items() if key not in _COMMON}
    for key in _CLASS_NAMES:
        if key in arguments and _PLUGIN.match(str(arguments[key])):
            raise UnsupportedError(f"{key}: got {arguments[key]!r}, allowed: a class of the library, by name")
    if verb.options is None:
        extras = request.arguments
    else:
        extras, rest = _options(verb, request.arguments)
        _refuse(name, rest, verb)
    asked = {**extras, **arguments}
    if name in SET_UP:
        check_small(f"arguments of {name}", asked)
    return asked


def _options(verb: Verb, given: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The verb's own keywords, checked, and the others."""
    assert verb.options is not None
    own = {key: value for key, value in given.items() if key in verb.options.model_fields}
    rest = {key: value for key, value in given.items() if key not in own}
    read = check(verb.options, own)
    return {key: value for key, value in read.model_dump(exclude_none=True).items() if key in own}, rest


def _refuse(name: str, extras: Mapping[str, object], verb: Verb | None = None) -> None:
    if extras:
        raise UnknownNameError(f"argument of {name}", min(extras), _names(verb or VERBS[name]))


def _names(verb: Verb) -> list[str]:
    declared = [field for field in verb.request.model_fields if field not in _COMMON]
    return [*declared, *(verb.options.model_fields if verb.options is not None else ())] or ["none"]


def _save(request: types.SaveRequest) -> NativeSave:
    """A name may hold anything; what an address cannot hold becomes an underscore."""
    if request.is_sampler and request.save_optimizer:
        raise InvalidInputError("save_optimizer", True, "False with is_sampler: samplers read weights alone")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", request.name or "").lstrip(".")[:100]
    if name and not CHECKPOINT_NAME.fullmatch(name):
        raise UserError(f"name: {request.name!r} cannot be a checkpoint's name")
    return NativeSave(
        name, request.save_optimizer, request.is_sampler, request.consumed_train_samples, request.interval
    )


def parse(name: str, fields: Any) -> types.AdapterRequest:
    """A request from what its JSON holds."""
    if not isinstance(fields, dict):
        raise MalformedRequestError("body: a JSON object is allowed")
    return check(verb_named(name).request, fields)
