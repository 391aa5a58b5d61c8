"""Encode native ops for the journal, and their results for the wire.

A body in the journal is a zero byte, the verb, a line feed and JSON. The zero byte marks it as native: neither Tinker's
protobuf nor its JSON begins with one. The JSON of a verb is what the client sent, byte for byte, and a replay reads it
as it was read the first time. It is written anew only if the request refers to something that may be gone or changed at
a replay: then rows of tokens replace conversations and references to batches, or the template replaces the name that
stood for it. Numbers of images are written as base64, a quarter of the size, and image files as data URIs. Earlier
versions always wrote the JSON anew; it is read in the same way.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from twinkle.errors import UserError
from twinkle.images import SentImages
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.types import IntArray
from twinkle.server.services.training.recovery import refused_body
from twinkle.server.services.training.run_kind import UNLIMITED
from twinkle.server.types import CreateNative, Encoding, Op, OpKind, Outcome, Payload, Refused, RunRecord, digest
from twinkle.server.verbs.features import GRIDS, TYPES, Row, as_rows, checked_rows, image_characters
from twinkle.server.verbs.settings import check_modules, check_small
from twinkle.server.verbs.verbs import kind_of, parse, payload_of
from twinkle.server.wire.errors import BodyTooLargeError, MalformedRequestError
from twinkle.server.wire.image_files import data_uri
from twinkle.server.wire.number_arrays import (
    PATCHES,
    PATCHES_KEY,
    ROUTES,
    NumberArrays,
    packed,
    packed_routes,
)
from twinkle_client.protocol.base import TYPE_KEY

_MARK = b"\x00"
_CREATE = "add_adapter_to_model"
_INPUTS = "inputs"
_REFUSED = "\x00refused"  # not a name of any argument: earlier versions journalled refusals under it


# The most bytes of a body with rows, without the numbers and files of images: about two million tokens. Parsing it
# blocks all threads for a quarter second.
ROWS_BYTES = 16 * 2**20
# The most objects and arrays that stand in one another in a request. Code that goes through them calls itself for each,
# and so do chat templates. Tools with parameters of parameters have about ten.
_MOST_NESTED = 100


def read_fields(sent: bytes, *, most: int | None) -> tuple[dict[str, Any], bool]:
    """Return the fields of a request from its JSON body, and whether it has patches as lists of numbers.

    BodyTooLargeError if the body has more than ``most`` bytes beside its images. None: it is in the journal, so it was
    accepted once.
    """
    if PATCHES_KEY not in sent:
        return _parsed(sent, most), False
    arrays = NumberArrays()
    text = arrays.take_from(sent)
    fields = _parsed(text, most)
    if not arrays.count:
        return fields, False
    if _put_back(arrays, fields.get(_INPUTS)) == arrays.count:
        return fields, True
    return _parsed(sent, most), False  # it has them elsewhere, too


def _parsed(text: bytes, most: int | None) -> dict[str, Any]:
    if most is not None and len(text) > most and text.count(b",") > most // 2:
        raise BodyTooLargeError(most // 2, "commas")
    try:
        fields = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        raise MalformedRequestError("body: not JSON") from None
    if not isinstance(fields, dict):
        raise MalformedRequestError("body: a JSON object is allowed")
    if most is not None:
        _check_nesting(fields)
    if most is not None and len(text) > most and len(text) - image_characters(fields.get(_INPUTS)) > most:
        raise BodyTooLargeError(most, "bytes without its images")
    return fields


def _check_nesting(fields: Mapping[str, object]) -> None:
    """Raise for values in values in values …, level by level, because a call for each would itself go too deep."""
    for name, value in fields.items():
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(_MOST_NESTED):
            inner = (each.values() if isinstance(each, dict) else each for each in level)
            level = [value for values in inner for value in values if type(value) in (dict, list)]
        if level:
            raise MalformedRequestError(f"{name}: objects and arrays in one another, allowed: {_MOST_NESTED} levels")


def _put_back(arrays: NumberArrays, inputs: object) -> int:
    """Put the numbers of images back into the rows; return how many rows have some."""
    count = 0
    for index, row in enumerate(inputs if isinstance(inputs, list) else [inputs]):
        if isinstance(row, dict) and arrays.has(row.get(PATCHES)):
            row[PATCHES] = arrays.read(row[PATCHES], f"inputs[{index}].{PATCHES}")
            count += 1
    return count


@dataclass(frozen=True)
class SentVerb:
    """A request of a verb, as it was sent.

    ``text`` is its JSON; None if the fields were changed since, so that the journal needs JSON of the new fields.
    """

    verb: str
    fields: Mapping[str, Any]  # its inputs must be checked rows before ``op`` is called
    text: bytes | None
    digest: bytes  # of the verb and the JSON that was sent: a request that comes again has the same
    text_digest: bytes  # of the JSON alone, by which earlier versions recognised a request

    @classmethod
    def read(cls, verb: str, text: bytes, *, most: int | None = None) -> "SentVerb":
        """Return a request from its JSON. ``most``: as in :func:`read_fields`."""
        text_digest = digest(text)
        fields, has_lists = read_fields(text, most=most)
        kept = None if has_lists else text
        return cls(verb, fields, kept, digest(verb.encode() + b"\n" + text_digest), text_digest)

    @classmethod
    def received(cls, verb: str, text: bytes) -> "SentVerb":
        """Return the request that a client sent. A field that only the journal may hold is refused.

        BodyTooLargeError if it has more than ``ROWS_BYTES`` beside its images.
        """
        sent = cls.read(verb, text, most=ROWS_BYTES)
        if _REFUSED in sent.fields:
            raise MalformedRequestError(f"body: {_REFUSED!r} is no argument of {verb}")
        return sent

    def op(self, run_id: str, seq: int) -> Op:
        """Return the op; a refused one if the request has a mistake.

        Writing a million tokens anew takes a second: not for the event loop.
        """
        payload: Payload
        try:
            request = parse(self.verb, {**self.fields})
            payload = payload_of(self.verb, request, tuple(self.fields.get(_INPUTS, ())))
        except UserError as error:
            payload = Refused(str(error))
        body = _body(self.verb, _written(self.fields) if self.text is None else self.text)
        return Op(run_id, seq, kind_of(self.verb), payload, body, self.digest)

    def refused(self, run_id: str, seq: int, message: str) -> Op:
        """Return a refused op, which takes the sequence number of a request that could not be understood."""
        return Op(run_id, seq, kind_of(self.verb), Refused(message), refused_body(message), self.digest)


def create_op(run: RunRecord, config: Mapping[str, object], accumulation: int, seed: int | None) -> Op:
    """Return the op that creates an adapter. ``config`` is empty if the run trains all parameters; ``seed``: as the
    client asked for it.
    """
    fields = {"config": config, "gradient_accumulation_steps": accumulation, "seed": seed}
    payload = CreateNative(run.spec, config, accumulation)
    return Op(run.run_id, 0, OpKind.CREATE, payload, _body(_CREATE, _written(fields)))


def read_op(run: RunRecord, seq: int, body: bytes) -> Op:
    """Return an op from its body in the journal."""
    verb, _, text = body[len(_MARK) :].partition(b"\n")
    sent = SentVerb.read(verb.decode(), text)
    fields = sent.fields
    if sent.verb == _CREATE:
        config, accumulation = fields["config"], fields["gradient_accumulation_steps"]
        return Op(run.run_id, seq, OpKind.CREATE, CreateNative(run.spec, config, accumulation), body)
    if _REFUSED in fields:
        return sent.refused(run.run_id, seq, fields[_REFUSED])
    if _INPUTS in fields:
        sent = replace(sent, fields={**fields, _INPUTS: checked_rows(as_rows(fields[_INPUTS]), UNLIMITED)})
    return sent.op(run.run_id, seq)


def _body(verb: str, text: bytes) -> bytes:
    return b"".join((_MARK, verb.encode(), b"\n", text))


def _written(fields: Mapping[str, object]) -> bytes:
    """Return fields as JSON, row by row: one ``json.dumps`` of a million tokens would block all other threads."""
    text = _dumped({name: fields[name] for name in fields if name != _INPUTS})
    if _INPUTS not in fields:
        return text
    rows = cast("Sequence[Row]", fields[_INPUTS])
    texts = (_dumped(dict(each for column in row.items() for each in _columns(*column))) for row in rows)
    comma = b"," if len(fields) > 1 else b""
    return b"".join((text[:-1], comma, f'"{_INPUTS}":['.encode(), b",".join(texts), b"]}"))


def _columns(name: str, column: IntArray | SentImages) -> Iterator[tuple[str, object]]:
    """Yield a column of a row, or the columns that hold its images, as JSON values."""
    if not isinstance(column, SentImages):
        yield name, packed_routes(column.astype(np.int16)) if name == ROUTES else column.tolist()
        return
    if column.types is not None:
        yield TYPES, column.types.tolist()
    if column.patches is None:
        yield name, [data_uri(image.file) for image in column.files]
    else:
        yield PATCHES, packed(column.patches.patches)
        yield GRIDS, column.patches.grids.tolist()


def _dumped(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def lora_config(sent: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked fields of a client's LoraConfig. ``target_modules`` may arrive as a list in any order; here it
    is sorted.
    """
    try:
        config = json.loads(sent) if isinstance(sent, str) else dict(sent)
    except (ValueError, RecursionError):
        raise UserError("config: not JSON; allowed: the fields of a LoraConfig as JSON text") from None
    if not isinstance(config, dict):
        raise UserError("config: allowed: the fields of a LoraConfig as a JSON object")
    kind = config.pop(TYPE_KEY, "LoraConfig")
    if kind != "LoraConfig":
        raise UserError(f"config: got a {str(kind)[:40]}, allowed: a LoraConfig")
    check_small("config", config)
    spec = spec_from_peft(config)
    check_modules(spec)
    if not isinstance(spec.target_modules, str):
        config["target_modules"] = list(spec.target_modules or ())
    return config


# --- results ----------------------------------------------------------------------------------------------------------


def succeeded(content: object) -> Outcome:
    return Outcome(Encoding.JSON, b"".join(_json(content)))


def answered(result: object) -> Outcome:
    """Return the outcome of a verb with this result. A verb without a result answers null."""
    return succeeded(None if result is None else {"result": result})


def _json(value: object) -> Iterator[bytes]:
    """Yield JSON in pieces, an array at a time, so that other threads can run in between."""
    if isinstance(value, Mapping):
        for number, (key, each) in enumerate(value.items()):
            yield b"," * (number > 0) or b"{"
            yield json.dumps(str(key)).encode() + b":"
            yield from _json(each)
        yield b"}" if value else b"{}"
    elif isinstance(value, np.ndarray) and value.ndim > 1:  # logits: row by row
        yield from _json(list(value))
    elif isinstance(value, list | tuple) and any(isinstance(each, np.ndarray) for each in value):
        for number, each in enumerate(value):
            yield b"," * (number > 0) or b"["
            yield from _json(each)
        yield b"]"
    else:
        yield json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode()


def finite(value: object) -> object:
    """Return the value in a form that JSON can hold: NaN and infinity become null, arrays become lists."""
    if isinstance(value, np.ndarray):
        if np.isfinite(value).all():
            return value.tolist()
        numbers = value.astype(object)
        numbers[~np.isfinite(value)] = None
        return numbers.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
