"""Ops for tests of the scheduler, which reads only their sequence number, kind, digest and price."""

from twinkle.server.types import Op, OpKind, Price, Refused


def op_of(adapter: str, seq: int, kind: OpKind, tokens: int, body: bytes = b"", work: int = 0) -> Op:
    """Return an op with this price, whatever its payload would cost."""
    op = Op(adapter, seq, kind, Refused(""), body)
    vars(op)["price"] = Price(tokens, max(tokens, work))
    return op
