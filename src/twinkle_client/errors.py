"""The errors of the client. Each is a :class:`TwinkleClientError`; most are also a standard type.

An error that the server answered has ``status``, ``detail`` (the server's text) and ``url``.
"""

from collections.abc import Iterable

__all__ = [
    "AuthenticationError",
    "ConnectionLostError",
    "GoneError",
    "InvalidRequestError",
    "LimitError",
    "MissingPackageError",
    "NotFoundError",
    "ResponseError",
    "ServerError",
    "SessionLostError",
    "TwinkleClientError",
    "invalid",
    "unknown",
]


class TwinkleClientError(Exception):
    """The base of all errors of the client.

    ``seq_id``: for a request to an adapter, the sequence number under which the server stores the request's outcome;
    None if the server sent none. ``code``: the server's identifier of this error, for programs (the codes are in
    :mod:`twinkle_client.protocol.base`); most errors have none, and older servers send none at all.
    """

    seq_id: int | None = None
    code: str | None = None


class InvalidRequestError(TwinkleClientError, ValueError):
    """The request is wrong: the server refused it (400, 409, 413, 422 …), or it was never sent (``status`` is None)."""

    def __init__(self, message: str, status: int | None = None, url: str = "") -> None:
        super().__init__(message if status is None else f"{message} (status {status} of {url})")
        self.status = status
        self.detail = message
        self.url = url


class ConnectionLostError(TwinkleClientError, ConnectionError):
    """The server could not be reached or did not answer in time, also not in the retries, if the request has any."""

    def __init__(self, message: str, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class SessionLostError(TwinkleClientError, ConnectionError):
    """The server has ended the session with its adapters and processors. Saved checkpoints still exist."""

    def __init__(self, session_id: str, reason: str) -> None:
        super().__init__(
            f"session {session_id} is gone: {reason}. To go on: make a new client with init_twinkle_client(), add the "
            "adapter again, and model.resume_from_checkpoint('twinkle://…') with an address that save() returned or "
            f"that client.list_checkpoints('{session_id}-<adapter name>') lists"
        )
        self.session_id = session_id
        self.reason = reason


class MissingPackageError(TwinkleClientError, ImportError):
    """An optional package is needed for this and is not installed."""


class ResponseError(TwinkleClientError):
    """The server answered with an error."""

    def __init__(self, status: int, detail: str, url: str) -> None:
        super().__init__(f"{detail or 'no detail given'} (status {status} of {url})")
        self.status = status
        self.detail = detail
        self.url = url


class AuthenticationError(ResponseError, PermissionError):
    """401 or 403: the token is missing, unknown, or not allowed to do this."""


class NotFoundError(ResponseError, LookupError):
    """404: this token has nothing with that name."""


class GoneError(ResponseError, LookupError):
    """410: the object that the request names existed once and will not come back."""


class LimitError(ResponseError, RuntimeError):
    """429: a limit of this token is reached; the text names it, its value, and what can be done.

    If ``code`` is ``limit_reached``, the limit is full until something is given up, and the error is raised at once,
    or after ``wait_for_limits`` seconds, an option of the client. Otherwise (too many requests or tokens at a time) it
    is raised only after the retries.
    """


class ServerError(ResponseError, RuntimeError):
    """The server failed, or its answer is not valid."""


def invalid(field: str, value: object, allowed: str) -> InvalidRequestError:
    """Return the error for a wrong argument, found before the request is sent."""
    shown = repr(value)
    shown = shown if len(shown) <= 120 else shown[:119] + "…"
    return InvalidRequestError(f"{field}: got {shown}, allowed: {allowed}")


def unknown(kind: str, name: object, known: Iterable[str]) -> InvalidRequestError:
    return InvalidRequestError(f"unknown {kind} {name!r}, known: {', '.join(sorted(known)) or 'none'}")
