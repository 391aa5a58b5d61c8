"""Turn requests of the native protocol's verbs into the payloads of ops.

The table of verbs is :data:`twinkle_client.protocol.verbs.VERBS`, which the client uses too.
"""

import re
from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.images import SentImages
from twinkle.server.ids import CHECKPOINT_NAME
from twinkle.server.types import Native, NativeLoad, NativePass, NativeSave, NativeVerb, OpKind
from twinkle.server.verbs.features import IMAGES, Row
from twinkle.server.verbs.settings import check_small
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.fields import adapter_of, check
from twinkle_client.protocol.verbs import (
    VERBS,
    AdapterRequest,
    ApplyPatchRequest,
    LoadRequest,
    ResumeFromCheckpointRequest,
    SaveRequest,
    Verb,
)

NO_ADAPTER = ""  # stands for the base model where an adapter's id is expected
_PLUGIN = re.compile(r"[a-z]+://")
_CLASS = "_cls"  # the suffix of fields that name a class
_COMMON = ("adapter_name", "seq_id")


def verb_named(name: str) -> Verb:
    if name not in VERBS:
        raise UnknownNameError("verb", name, VERBS)
    return VERBS[name]


def kind_of(name: str) -> OpKind:
    """Return the kind of op that a verb becomes."""
    return OpKind(verb_named(name).kind)


def payload_of(name: str, request: AdapterRequest, rows: tuple[Row, ...] = ()) -> Native:
    """Return the payload of a verb's op. ``rows``: the checked inputs, if it is a pass."""
    verb = verb_named(name)
    if OpKind(verb.kind).is_pass:
        options, rest = _options(verb, request.arguments)
        if rest and name == "backward":
            raise UnknownNameError("argument of backward", min(rest), _names(verb))
        columns = tuple({column: row[column] for column in row if column != IMAGES} for row in rows)
        images = tuple(row.get(IMAGES, SentImages()) for row in rows)
        return NativePass(name, columns, options, rest, images if any(images) else ())
    if verb.kind in ("save", "load"):
        _refuse(name, request.arguments)
    if isinstance(request, SaveRequest):
        return _save(request)
    if isinstance(request, LoadRequest):
        return NativeLoad("load", request.name, request.load_optimizer)
    if isinstance(request, ResumeFromCheckpointRequest):
        return NativeLoad("resume_from_checkpoint", request.name, not request.resume_only_model)
    if isinstance(request, ApplyPatchRequest):
        raise UnsupportedError(f"apply_patch: {request.patch_cls!r}: code of the served model is not patched")
    return NativeVerb(name, _arguments(name, verb, request), verb.steps)


def _arguments(name: str, verb: Verb, request: AdapterRequest) -> dict[str, object]:
    declared = {key: value for key, value in request.model_dump().items() if key in type(request).model_fields}
    arguments = {key: value for key, value in declared.items() if key not in _COMMON}
    for key, value in arguments.items():
        if key.endswith(_CLASS) and _PLUGIN.match(str(value)):  # classes are the library's, never code from elsewhere
            raise UnsupportedError(f"{key}: got {value!r}, allowed: a class of the library, by name")
    if verb.options is None:
        extras = request.arguments
    else:
        extras, rest = _options(verb, request.arguments)
        _refuse(name, rest)
    asked = {**extras, **arguments}
    if verb.sets_up:
        check_small(f"arguments of {name}", asked)
    return asked


def _options(verb: Verb, given: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return the verb's own keywords, checked, and all other keywords."""
    assert verb.options is not None
    known = _names_of_options(verb)
    own = {key: value for key, value in given.items() if key in known}
    rest = {key: value for key, value in given.items() if key not in known}
    read = adapter_of(verb.options).dump_python(check(verb.options, own), exclude_none=True)
    return {key: value for key, value in read.items() if key in own}, rest


def _refuse(name: str, extras: Mapping[str, object]) -> None:
    if extras:
        raise UnknownNameError(f"argument of {name}", min(extras), _names(VERBS[name]))


def _names(verb: Verb) -> list[str]:
    declared = [field for field in verb.request.model_fields if field not in _COMMON]
    return [*declared, *_names_of_options(verb)] or ["none"]


def _names_of_options(verb: Verb) -> list[str]:
    return [] if verb.options is None else [field.name for field in fields_of(verb.options)]


def _save(request: SaveRequest) -> NativeSave:
    """Return the payload of a save.

    In its name, characters that an address cannot hold become underscores; dots at the beginning are removed, and 100
    characters are kept.
    """
    if request.is_sampler and request.save_optimizer:
        raise InvalidInputError("save_optimizer", True, "False with is_sampler: samplers read weights alone")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", request.name or "").lstrip(".")[:100]
    if name and not CHECKPOINT_NAME.fullmatch(name):
        raise UserError(f"name: {request.name!r} cannot be a checkpoint's name")
    return NativeSave(
        name, request.save_optimizer, request.is_sampler, request.consumed_train_samples, request.interval
    )


def parse(name: str, fields: Any) -> AdapterRequest:
    """Return the request of a verb from the fields of its JSON."""
    if not isinstance(fields, dict):
        raise MalformedRequestError("body: a JSON object is allowed")
    return check(verb_named(name).request, fields)
