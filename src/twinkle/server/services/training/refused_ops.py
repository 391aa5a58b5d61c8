"""Ops that are refused before they run, as they are journalled: the reason in the place of what was sent.

A body of which only the error will ever be repeated may be a thousand times larger than what came over the wire. Its
digest stays, which tells the same request from another one under its number.
"""

import json
from dataclasses import replace

from twinkle.server.types import Op, OpKind, Refused

_MARK = b"\x00\x00"  # no body of any protocol begins like this
_MOST_CHARACTERS = 4096  # of a reason
_SMALL = 512  # bytes: a shorter body is kept as it is


def journalled(op: Op, refused: Refused) -> Op:
    """Return a refused op as it goes to the journal: without its body, unless that is small."""
    if len(op.body) <= _SMALL:
        return op
    message = refused.message[:_MOST_CHARACTERS]
    body = _MARK + json.dumps({"refused": message}).encode()
    return replace(op, payload=replace(refused, message=message), body=body, sent_digest=op.digest)


def is_refused(body: bytes) -> bool:
    return body.startswith(_MARK)


def read_refused(adapter_id: str, seq: int, kind: OpKind, body: bytes) -> Op:
    """From the journal."""
    return Op(adapter_id, seq, kind, Refused(json.loads(body[len(_MARK) :])["refused"]), body)
