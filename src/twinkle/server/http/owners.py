"""Whom a request concerns: each route names one of the functions below as its owner, and Ray sends the request there.

An owner reads the path and the body of a request and returns an address, or None: any process can answer. Nothing is
checked here. What cannot be understood has no address, and whichever process is asked answers with what is wrong.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from twinkle.errors import UserError
from twinkle.server import ids
from twinkle.server.http.asgi_relay import HttpRequest
from twinkle.server.ids import CheckpointPath
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.peeking import text_field
from twinkle.server.wire.training import decompress
from twinkle.server.wire.training_json import is_json
from twinkle_client.protocol.base import SESSION_HEADER

_MODEL_ID = pb.ForwardBackwardRequest.MODEL_ID_FIELD_NUMBER


# --- addresses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfRun:
    """An adapter that exists, or did. ``model``: any replica of it can say that there is no such adapter."""

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
    """A sampling session that exists, or did."""

    sampling_session_id: str


@dataclass(frozen=True)
class OfNewSampler:
    """A sampling session that is to be created; without a checkpoint on the base model itself."""

    sampling_session_id: str
    base_model: str | None
    checkpoint: CheckpointPath | None


@dataclass(frozen=True)
class OfModel:
    """Any replica of a base model; the first one, where what it holds is in its memory alone."""

    name: str
    first: bool = False


@dataclass(frozen=True)
class OfOpenAiModel:
    """What OpenAI's protocol calls a model: a base model, a run or a checkpoint."""

    name: str


@dataclass(frozen=True)
class OfProcessors:
    """The datasets and loaders of a session."""

    session_id: str


Address = OfRun | OfNewRun | OfSampler | OfNewSampler | OfModel | OfOpenAiModel | OfProcessors


# --- owners -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Envelope:
    """A request with the parameters of its path. ``max_bytes`` of its body after decompression."""

    request: HttpRequest
    path: Mapping[str, str]
    max_bytes: int

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The JSON object in the body; empty if there is none."""
        return _parsed(self.request.body)

    @property
    def native_run_id(self) -> str | None:
        """The run of the adapter that a request of our own protocol names, in the session of its header."""
        session, name = self.request.header(SESSION_HEADER), self.fields.get("adapter_name")
        return f"{session}-{name}" if session and isinstance(name, str) and name else None


Owner = Callable[[Envelope], Address | None]


def anybody(_envelope: Envelope) -> None:
    """Any process: the shared state has the answer."""


def by_model_id(envelope: Envelope) -> Address | None:
    """The run in ``model_id``, of JSON or protobuf; where there is none, the one that the body asks to create."""
    request = envelope.request
    try:
        body = decompress(request.body, request.header("content-encoding"), envelope.max_bytes)
    except UserError:
        return None
    if not is_json(body):
        return _named(OfRun, text_field(body, _MODEL_ID))
    fields = _parsed(body)
    return _named(OfRun, fields.get("model_id")) if "model_id" in fields else _new_run(fields)


def by_new_model(envelope: Envelope) -> Address | None:
    """The run that the body asks to create."""
    return _new_run(envelope.fields)


def by_run_in_path(envelope: Envelope) -> Address | None:
    """The run that the path names."""
    return OfRun(envelope.path["run_id"])


def by_request_id(envelope: Envelope) -> Address | None:
    """The run or sampling session whose future is asked about."""
    request_id = envelope.fields.get("request_id")
    request = ids.RequestId.parse_or_none(request_id) if isinstance(request_id, str) else None
    if request is None:
        return None
    return OfSampler(request.owner) if request.is_sample else OfRun(request.owner)


def by_sampling_session(envelope: Envelope) -> Address | None:
    """The sampling session in the body, or in its ``target``."""
    fields = envelope.fields
    target = fields.get("target", fields)
    return _named(OfSampler, target.get("sampling_session_id") if isinstance(target, dict) else None)


def by_new_sampling_session(envelope: Envelope) -> Address | None:
    """The sampling session that the body asks to create."""
    fields = envelope.fields
    session, number = fields.get("session_id"), fields.get("sampling_session_seq_id")
    if not isinstance(session, str) or not isinstance(number, int):
        return None
    checkpoint = _checkpoint(fields.get("model_path"))
    return OfNewSampler(ids.sampling_session_id(session, number), _text(fields.get("base_model")), checkpoint)


def by_openai_model(envelope: Envelope) -> Address | None:
    """The model of OpenAI's protocol, named in the path or in the body."""
    return _named(OfOpenAiModel, envelope.path.get("model") or envelope.fields.get("model"))


def by_base_model(envelope: Envelope) -> Address | None:
    """Any replica of the base model in the path."""
    return OfModel(envelope.path["model"])


def by_first_replica(envelope: Envelope) -> Address | None:
    """The first replica of the base model in the path: it knows the uploads and speaks for the health."""
    return OfModel(envelope.path["model"], first=True)


def by_adapter(envelope: Envelope) -> Address | None:
    """The adapter of the session that the body names; without one, any replica of the base model in the path."""
    run_id, model = envelope.native_run_id, envelope.path["model"]
    return OfModel(model) if run_id is None else OfRun(run_id, model)


def by_new_adapter(envelope: Envelope) -> Address | None:
    """The adapter that the body asks to create on the base model in the path."""
    run_id, model = envelope.native_run_id, envelope.path["model"]
    return OfModel(model) if run_id is None else OfNewRun(run_id, model)


def by_sampled_weights(envelope: Envelope) -> Address | None:
    """The run of the checkpoint that is sampled from, else as :func:`by_adapter`."""
    checkpoint = _checkpoint(envelope.fields.get("adapter_uri"))
    return by_adapter(envelope) if checkpoint is None else OfRun(checkpoint.run_id, envelope.path["model"])


def by_processors(envelope: Envelope) -> Address | None:
    """The processors of the session in the header."""
    return OfProcessors(envelope.request.header(SESSION_HEADER) or "")


# --- which answers are handed on as they come -------------------------------------------------------------------------

Streams = Callable[[Envelope], bool]


def never_streams(_envelope: Envelope) -> bool:
    return False


def always_streams(_envelope: Envelope) -> bool:
    return True


def streams_if_asked(envelope: Envelope) -> bool:
    """Return what the field ``stream`` of OpenAI's protocol says."""
    return bool(envelope.fields.get("stream"))


# --- reading ----------------------------------------------------------------------------------------------------------


def _new_run(fields: Mapping[str, Any]) -> Address | None:
    session, number = fields.get("session_id"), fields.get("model_seq_id")
    if not isinstance(session, str) or not isinstance(number, int):
        return None
    return OfNewRun(ids.run_id(session, number), _text(fields.get("base_model")), _checkpoint(fields.get("path")))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _checkpoint(address: object) -> CheckpointPath | None:
    try:
        return CheckpointPath.parse(address) if isinstance(address, str) else None
    except UserError:
        return None


def _named(kind: type[OfRun] | type[OfSampler] | type[OfOpenAiModel], name: object) -> Address | None:
    return kind(name) if isinstance(name, str) and name else None


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
