"""Ops for tests of the scheduler, which reads their place, kind, digest and price, and nothing else."""

from twinkle.server.types import Op, OpKind, Price, Refused


def op_of(adapter: str, seq: int, kind: OpKind, tokens: int, body: bytes = b"", work: int = 0) -> Op:
    """Return an op of a price that no payload has to have."""
    op = Op(adapter, seq, kind, Refused(""), body)
    vars(op)["price"] = Price(tokens, max(tokens, work))
    return op
