"""Owners: functions that find out which run, sampling session, model or processors a request concerns.

Each route names one of these functions as its owner. It reads the path and the body of a request and returns an
address, by which the Ray runtime finds the replica that must answer. None: any process can answer. Owners check
nothing: a request that they cannot understand has no address, or that of any replica of its model; whichever process
gets it answers with the error.
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
    """The address of an adapter that exists, or did.

    ``model``: its base model, if the request names it. If the adapter is unknown, any replica of that model answers.
    """

    run_id: str
    model: str | None = None


@dataclass(frozen=True)
class OfNewRun:
    """The address of an adapter to be created on ``base_model``, or if that is None, on the checkpoint's base model."""

    run_id: str
    base_model: str | None
    checkpoint: CheckpointPath | None = None


@dataclass(frozen=True)
class OfSampler:
    """The address of a sampling session that exists, or did."""

    sampling_session_id: str


@dataclass(frozen=True)
class OfNewSampler:
    """The address of a sampling session that is to be created. Without a checkpoint it samples from the base model."""

    sampling_session_id: str
    base_model: str | None
    checkpoint: CheckpointPath | None


@dataclass(frozen=True)
class OfModel:
    """The address of any replica of a base model.

    ``first``: only the first replica, for state that is only in its memory, such as uploads.
    """

    name: str
    first: bool = False


@dataclass(frozen=True)
class OfOpenAiModel:
    """The address of what OpenAI's protocol calls a model: a base model, a run or a checkpoint."""

    name: str


@dataclass(frozen=True)
class OfProcessors:
    """The address of the datasets and loaders of a session."""

    session_id: str


Address = OfRun | OfNewRun | OfSampler | OfNewSampler | OfModel | OfOpenAiModel | OfProcessors


# --- owners -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Envelope:
    """A request with the parameters of its path. ``max_bytes``: the most bytes that its body may decompress to."""

    request: HttpRequest
    path: Mapping[str, str]
    max_bytes: int

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """Return the JSON object in the body; an empty one if the body is something else."""
        return _parsed(self.request.body)

    @property
    def native_run_id(self) -> str | None:
        """Return the run id of the adapter that a native request names, in the session that its header names."""
        session, name = self.request.header(SESSION_HEADER), self.fields.get("adapter_name")
        return f"{session}-{name}" if session and isinstance(name, str) and name else None


Owner = Callable[[Envelope], Address | None]


def anybody(_envelope: Envelope) -> None:
    """Return None: any process can answer, from the shared database and files."""


def by_model_id(envelope: Envelope) -> Address | None:
    """Return the run in ``model_id`` of a JSON or protobuf body; for JSON without one, the run to be created."""
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
    """Return the run that the body asks to create."""
    return _new_run(envelope.fields)


def by_run_in_path(envelope: Envelope) -> Address | None:
    """Return the run that the path names."""
    return OfRun(envelope.path["run_id"])


def by_request_id(envelope: Envelope) -> Address | None:
    """Return the run or sampling session whose future the client polls or cancels."""
    request_id = envelope.fields.get("request_id")
    request = ids.RequestId.parse_or_none(request_id) if isinstance(request_id, str) else None
    if request is None:
        return None
    return OfSampler(request.owner) if request.is_sample else OfRun(request.owner)


def by_sampling_session(envelope: Envelope) -> Address | None:
    """Return the sampling session in the body's field ``target``, or in the body itself if it has no such field."""
    fields = envelope.fields
    target = fields.get("target", fields)
    return _named(OfSampler, target.get("sampling_session_id") if isinstance(target, dict) else None)


def by_new_sampling_session(envelope: Envelope) -> Address | None:
    """Return the sampling session that the body asks to create."""
    fields = envelope.fields
    session, number = fields.get("session_id"), fields.get("sampling_session_seq_id")
    if not isinstance(session, str) or not isinstance(number, int):
        return None
    checkpoint = _checkpoint(fields.get("model_path"))
    return OfNewSampler(ids.sampling_session_id(session, number), _text(fields.get("base_model")), checkpoint)


def by_openai_model(envelope: Envelope) -> Address | None:
    """Return the model of OpenAI's protocol that the path or the body names."""
    return _named(OfOpenAiModel, envelope.path.get("model") or envelope.fields.get("model"))


def by_base_model(envelope: Envelope) -> Address | None:
    """Return any replica of the base model in the path."""
    return OfModel(envelope.path["model"])


def by_first_replica(envelope: Envelope) -> Address | None:
    """Return the first replica of the base model in the path, which has the uploads and reports the health."""
    return OfModel(envelope.path["model"], first=True)


def by_adapter(envelope: Envelope) -> Address | None:
    """Return the adapter that the body names; without one, any replica of the base model in the path."""
    run_id, model = envelope.native_run_id, envelope.path["model"]
    return OfModel(model) if run_id is None else OfRun(run_id, model)


def by_new_adapter(envelope: Envelope) -> Address | None:
    """Return the adapter that the body asks to create on the base model in the path; if it names none, any replica."""
    run_id, model = envelope.native_run_id, envelope.path["model"]
    return OfModel(model) if run_id is None else OfNewRun(run_id, model)


def by_sampled_weights(envelope: Envelope) -> Address | None:
    """Return the run of the checkpoint in ``adapter_uri``; without one, the same as :func:`by_adapter`."""
    checkpoint = _checkpoint(envelope.fields.get("adapter_uri"))
    return by_adapter(envelope) if checkpoint is None else OfRun(checkpoint.run_id, envelope.path["model"])


def by_processors(envelope: Envelope) -> Address | None:
    """Return the processors of the session in the header."""
    return OfProcessors(envelope.request.header(SESSION_HEADER) or "")


# --- answers that a relaying process streams --------------------------------------------------------------------------

Streams = Callable[[Envelope], bool]  # whether the answer is relayed in parts, as they come


def never_streams(_envelope: Envelope) -> bool:
    return False


def always_streams(_envelope: Envelope) -> bool:
    return True


def streams_if_asked(envelope: Envelope) -> bool:
    """Return whether the field ``stream`` of OpenAI's protocol is set."""
    return bool(envelope.fields.get("stream"))


# --- helpers ----------------------------------------------------------------------------------------------------------


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
