"""Whom a request concerns, read off its path and body. What cannot be understood concerns nobody in particular.

Nothing is checked here: whoever is asked answers with what is wrong.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.errors import UserError
from twinkle.server import ids
from twinkle.server.http.asgi_relay import HttpRequest
from twinkle.server.http.requests import JSON_BYTES, PREFIX
from twinkle.server.ids import CheckpointPath
from twinkle.server.protocols.native.requests import ROWS_BYTES, SESSION_HEADER
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.peeking import text_field
from twinkle.server.wire.training import decompress
from twinkle.server.wire.training_json import is_json

_MODEL_ROUTE = re.compile(rf"{PREFIX}/(model|sampler)/(.+?)/(?:twinkle/(.+)|healthz)")
_OF_MODEL_ID = frozenset(
    f"{PREFIX}/{name}"
    for name in (
        "forward",
        "forward_backward",
        "get_info",
        "optim_step",
        "load_weights",
        "save_weights",
        "save_weights_external",
        "save_weights_for_sampler",
        "unload_model",
    )
)
_POLLS = frozenset(f"{PREFIX}/{name}" for name in ("retrieve_future", "retrieve_futures"))
_BEGINNINGS = frozenset(f"{PREFIX}/{name}" for name in ("asample", "create_model", "create_sampling_session"))
_PASSES = frozenset(f"{PREFIX}/{name}" for name in ("forward", "forward_backward"))
_OPENAI = re.compile(r"(?:/api)?/v1/(chat/completions|completions|models/.+)")
_METRICS = re.compile(rf"{PREFIX}/twinkle/training_runs/([^/]+)/metrics")
_MODEL_ID = pb.ForwardBackwardRequest.MODEL_ID_FIELD_NUMBER
_UPLOADS = ("upload_to_hub", "upload_status")
_SAMPLES = ("sample", "sample_stream")


@dataclass(frozen=True)
class OfRun:
    """An adapter that is there, or was. ``model``: any replica of it can say that there is no such adapter."""

    run_id: str
    model: str | None = None


@dataclass(frozen=True)
class OfNewRun:
    """An adapter that is to be created on a base model, or on that of a checkpoint."""

    run_id: str
    base_model: str | None
    checkpoint: CheckpointPath | None = None


@dataclass(frozen=True)
class OfSampler:
    sampling_session_id: str


@dataclass(frozen=True)
class OfNewSampler:
    """A sampling session that is to be created; without a checkpoint on the base model itself."""

    sampling_session_id: str
    base_model: str | None
    checkpoint: CheckpointPath | None


@dataclass(frozen=True)
class OfModel:
    """Any replica of a base model; the first one, where what it holds is in no state."""

    name: str
    first: bool = False


@dataclass(frozen=True)
class OfOpenAiModel:
    """What OpenAI's protocol calls a model: a base model, a run or a checkpoint."""

    name: str


@dataclass(frozen=True)
class OfProcessors:
    session_id: str


Address = OfRun | OfNewRun | OfSampler | OfNewSampler | OfModel | OfOpenAiModel | OfProcessors


@dataclass(frozen=True)
class Destination:
    """``address`` None: nobody in particular. ``streams``: the answer is to be handed on as it comes."""

    address: Address | None
    streams: bool = False


def destination_of(request: HttpRequest, most_bytes: int) -> Destination:
    """``most_bytes`` of a body after decompression."""
    openai = _OPENAI.fullmatch(request.path)
    if openai is not None:
        fields = _fields(request)
        listed = openai[1].partition("models/")[2]
        return Destination(_named(OfOpenAiModel, listed or fields.get("model")), bool(fields.get("stream")))
    return Destination(_address_of(request, most_bytes), request.path.endswith("/sample_stream"))


def _address_of(request: HttpRequest, most_bytes: int) -> Address | None:
    native = _MODEL_ROUTE.fullmatch(request.path)
    if native is not None:
        return _of_native(request, native[1], native[2], native[3])
    if request.path.startswith(f"{PREFIX}/processor/"):
        return OfProcessors(request.header(SESSION_HEADER) or "")
    return _of_tinker(request, most_bytes) if request.method == "POST" else None


def ends_with_its_client(request: HttpRequest) -> bool:
    """Whether nobody is served by going on when its client has left: it reads, waits, or samples for this client alone.

    Everything else is finished once it has begun. Otherwise an op could be journalled, and never run.
    """
    if request.method in ("GET", "HEAD") or request.path in _POLLS or _OPENAI.fullmatch(request.path) is not None:
        return True
    native = _MODEL_ROUTE.fullmatch(request.path)
    return native is not None and native[1] == "sampler" and native[3] in _SAMPLES


def is_short(request: HttpRequest) -> bool:
    """Whether its answer comes within half a minute, as long as whoever is asked is there."""
    return request.path in _POLLS or request.path in _OF_MODEL_ID or request.path in _BEGINNINGS


def most_bytes_of(path: str, most: int) -> int:
    """What a body may have at most, ``most`` being the limit for any."""
    if path in _PASSES or path.startswith(f"{PREFIX}/processor/"):
        return most
    return min(most, ROWS_BYTES if _MODEL_ROUTE.fullmatch(path) is not None else 4 * JSON_BYTES)


def _of_tinker(request: HttpRequest, most_bytes: int) -> Address | None:
    if request.path in _OF_MODEL_ID:
        return _of_model_id(request, most_bytes)
    metrics = _METRICS.fullmatch(request.path)  # whoever has the run knows its newest step
    if metrics is not None:
        return OfRun(metrics[1])
    match request.path.removeprefix(f"{PREFIX}/"):
        case "retrieve_future" | "cancel_future":
            return _of_future(_fields(request).get("request_id"))
        case "retrieve_futures":
            target = _fields(request).get("target")
            return _named(OfSampler, target.get("sampling_session_id") if isinstance(target, dict) else None)
        case "asample":
            return _named(OfSampler, _fields(request).get("sampling_session_id"))
        case "create_model":
            return _of_new_run(_fields(request))
        case "create_sampling_session":
            return _of_new_sampler(_fields(request))
        case _:
            return None


def _of_model_id(request: HttpRequest, most_bytes: int) -> Address | None:
    try:
        body = decompress(request.body, request.header("content-encoding"), most_bytes)
    except UserError:
        return None
    if not is_json(body):
        return _named(OfRun, text_field(body, _MODEL_ID))
    fields = _parsed(body)
    return _named(OfRun, fields.get("model_id")) if "model_id" in fields else _of_new_run(fields)


def _of_future(request_id: object) -> Address | None:
    parts = ids.split_request_id(request_id) if isinstance(request_id, str) else None
    if parts is None:
        return None
    return OfSampler(parts[0]) if ":sample:" in parts[0] else OfRun(parts[0])


def _of_new_run(fields: Mapping[str, Any]) -> Address | None:
    session, number = fields.get("session_id"), fields.get("model_seq_id")
    if not isinstance(session, str) or not isinstance(number, int):
        return None
    base = fields.get("base_model")
    return OfNewRun(
        ids.run_id(session, number), base if isinstance(base, str) else None, _checkpoint(fields.get("path"))
    )


def _of_new_sampler(fields: Mapping[str, Any]) -> Address | None:
    session, number = fields.get("session_id"), fields.get("sampling_session_seq_id")
    if not isinstance(session, str) or not isinstance(number, int):
        return None
    base = fields.get("base_model")
    return OfNewSampler(
        ids.sampling_session_id(session, number),
        base if isinstance(base, str) else None,
        _checkpoint(fields.get("model_path")),
    )


def _of_native(request: HttpRequest, kind: str, model: str, verb: str | None) -> Address:
    if verb is None or verb.partition("/")[0] in _UPLOADS:
        return OfModel(model, first=True)
    session = request.header(SESSION_HEADER)
    if kind == "sampler" and verb not in _SAMPLES:
        return OfModel(model)
    fields = _fields(request)
    name = fields.get("adapter_name")
    run_id = f"{session}-{name}" if session and isinstance(name, str) and name else None
    if kind == "model":
        return OfModel(model) if run_id is None else _of_adapter(run_id, model, verb)
    checkpoint = _checkpoint(fields.get("adapter_uri"))
    if checkpoint is not None:
        return OfRun(checkpoint.run_id, model)
    return OfModel(model) if run_id is None else OfRun(run_id, model)


def _of_adapter(run_id: str, model: str, verb: str) -> Address:
    return OfNewRun(run_id, model) if verb == "add_adapter_to_model" else OfRun(run_id, model)


def _checkpoint(address: object) -> CheckpointPath | None:
    try:
        return CheckpointPath.parse(address) if isinstance(address, str) else None
    except UserError:
        return None


def _named(kind: type[OfRun] | type[OfSampler] | type[OfOpenAiModel], name: object) -> Address | None:
    return kind(name) if isinstance(name, str) and name else None


def _fields(request: HttpRequest) -> Mapping[str, Any]:
    return _parsed(request.body)


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
