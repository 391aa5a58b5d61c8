"""Native ops in the journal, and their results on the wire.

A body in the journal is a zero byte, the verb, a line feed and JSON: neither Tinker's protobuf nor its JSON begins with
a zero byte. What it says is what the request meant: rows of tokens in the place of conversations and of references.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from twinkle.errors import UserError
from twinkle.model.peft_config import spec_from_peft
from twinkle.server.types import CreateNative, Encoding, Op, OpKind, Outcome, Refused, RunRecord
from twinkle.server.verbs.features import Row
from twinkle.server.verbs.settings import check_small, check_target_modules
from twinkle.server.verbs.verbs import kind_of, parse, payload_of
from twinkle_client.protocol.base import TYPE_KEY

_MARK = b"\x00"
_CREATE = "add_adapter_to_model"
_INPUTS = "inputs"
_REFUSED = "\x00refused"  # no argument of anybody's


def is_native(body: bytes) -> bool:
    return body.startswith(_MARK)


def journal_body(verb: str, fields: Mapping[str, object]) -> bytes:
    """Written row by row: one call of ``json.dumps`` for a million tokens would let no other thread work."""
    parts = [_MARK + verb.encode() + b"\n", _text({name: fields[name] for name in fields if name != _INPUTS})]
    if _INPUTS in fields:
        rows = cast("Sequence[Row]", fields[_INPUTS])
        texts = (_text({name: column.tolist() for name, column in row.items()}) for row in rows)
        parts[-1] = parts[-1][:-1]  # its closing brace
        parts += [b"," if len(fields) > 1 else b"", f'"{_INPUTS}":['.encode(), b",".join(texts), b"]}"]
    return b"".join(parts)


def _text(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def create_op(run: RunRecord, config: Mapping[str, object], accumulation: int, seed: int | None) -> Op:
    """``seed``: as it was asked for."""
    fields = {"config": config, "gradient_accumulation_steps": accumulation, "seed": seed}
    payload = CreateNative(run.spec, config, accumulation)
    return Op(run.run_id, 0, OpKind.CREATE, payload, journal_body(_CREATE, fields))


def verb_op(run_id: str, seq: int, verb: str, fields: Mapping[str, Any], sent: bytes) -> Op:
    """``fields``: the request; its inputs are checked rows. What is wrong with the rest makes the op refused."""
    body = journal_body(verb, fields)
    return _op(run_id, seq, verb, fields, body, sent)


def refused_op(run_id: str, seq: int, verb: str, message: str, sent: bytes) -> Op:
    return Op(run_id, seq, kind_of(verb), Refused(message), journal_body(verb, {_REFUSED: message}), sent)


def read_op(run: RunRecord, seq: int, body: bytes) -> Op:
    """From the journal."""
    verb, _, text = body[1:].partition(b"\n")
    fields = json.loads(text)
    if verb.decode() == _CREATE:
        config, accumulation = fields["config"], fields["gradient_accumulation_steps"]
        return Op(run.run_id, seq, OpKind.CREATE, CreateNative(run.spec, config, accumulation), body)
    if _REFUSED in fields:
        return Op(run.run_id, seq, kind_of(verb.decode()), Refused(fields[_REFUSED]), body)
    return _op(run.run_id, seq, verb.decode(), fields, body, None)


def _op(run_id: str, seq: int, verb: str, fields: Mapping[str, Any], body: bytes, sent: bytes | None) -> Op:
    kind = kind_of(verb)
    try:
        request = parse(verb, {**fields})
        payload = payload_of(verb, request, tuple(map(_arrays, fields.get(_INPUTS, ()))))
    except UserError as error:
        return Op(run_id, seq, kind, Refused(str(error)), body, sent)
    return Op(run_id, seq, kind, payload, body, sent)


def _arrays(row: Mapping[str, Any]) -> Row:
    """A checked row, as the journal has it or as it is."""
    return {name: np.asarray(values, np.int64) for name, values in row.items()}


def lora_config(sent: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """What a client sent as LoraConfig. Sets come as lists in any order: here they are sorted."""
    if sent is None:
        raise UserError("config: got None, allowed: a LoraConfig with at least r and target_modules")
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
    check_target_modules(spec.target_modules)
    if not isinstance(spec.target_modules, str):
        config["target_modules"] = list(spec.target_modules or ())
    return config


# --- results ----------------------------------------------------------------------------------------------------------


def succeeded(content: object) -> Outcome:
    return Outcome(Encoding.JSON, b"".join(_json(content)))


def answered(result: object) -> Outcome:
    """Of a verb; one that has nothing to tell answers null."""
    return succeeded(None if result is None else {"result": result})


def _json(value: object) -> Iterator[bytes]:
    """Yield JSON in pieces, an array at a time, so that other threads get to work in between."""
    if isinstance(value, Mapping):
        for number, (key, each) in enumerate(value.items()):
            yield b"," * (number > 0) or b"{"
            yield json.dumps(str(key)).encode() + b":"
            yield from _json(each)
        yield b"}" if value else b"{}"
    elif isinstance(value, list | tuple) and any(isinstance(each, np.ndarray) for each in value):
        for number, each in enumerate(value):
            yield b"," * (number > 0) or b"["
            yield from _json(each)
        yield b"]"
    else:
        yield json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode()


def finite(value: object) -> object:
    """Return what JSON can hold: it has neither NaN nor infinity, which become null. Arrays become lists."""
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
