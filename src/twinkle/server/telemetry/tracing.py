"""Spans of requests and of the work that they lead to: what services call, and how it costs nothing when it is off.

A request's trace holds its op: journalled, waiting, running. A batch is a trace of its own, linked with the ops in it,
since it belongs to many. The exporting implementation is in ``otlp_spans.py``.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

__all__ = ["NO_TRACING", "UNTRACED", "OpSpan", "RequestSpan", "Tracing"]

Attributes = Mapping[str, str | int | Sequence[str]]


class RequestSpan(Protocol):
    @property
    def trace_id(self) -> str | None:
        """In hexadecimal; None if it is not traced."""
        ...

    def end(self, method: str, route: str, status: int, request_id: str | None) -> None: ...


class OpSpan(Protocol):
    """An op or a sample from accepted to its result."""

    def started(self) -> None:
        """It waits no more."""
        ...

    def ended(self, outcome: str) -> None: ...


class Tracing(Protocol):
    """No method waits, and none raises."""

    def request(self, headers: Sequence[tuple[bytes, bytes]]) -> RequestSpan:
        """A request has come; ``headers`` may name the span that it comes from (traceparent)."""
        ...

    def step(self, name: str, attributes: Attributes) -> AbstractContextManager[None]:
        """Something that is done on behalf of the present request before it is answered."""
        ...

    def op(self, name: str, request_id: str, attributes: Attributes) -> OpSpan:
        """An op of the present request, or of none."""
        ...

    def batch(self, ops: Sequence[OpSpan], attributes: Attributes) -> AbstractContextManager[None]:
        """On the device."""
        ...


class _Untraced:
    """Any span, where nothing is traced."""

    trace_id = None

    def end(self, method: str, route: str, status: int, request_id: str | None) -> None:
        pass

    def started(self) -> None:
        pass

    def ended(self, outcome: str) -> None:
        pass


UNTRACED = _Untraced()
_NOTHING = nullcontext()


class _NoTracing:
    def request(self, headers: Sequence[tuple[bytes, bytes]]) -> RequestSpan:
        return UNTRACED

    def step(self, name: str, attributes: Attributes) -> AbstractContextManager[None]:
        return _NOTHING

    def op(self, name: str, request_id: str, attributes: Attributes) -> OpSpan:
        return UNTRACED

    def batch(self, ops: Sequence[OpSpan], attributes: Attributes) -> AbstractContextManager[None]:
        return _NOTHING


NO_TRACING: Tracing = _NoTracing()
