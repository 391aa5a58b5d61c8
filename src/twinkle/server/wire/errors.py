"""Errors that are answered with an HTTP status and not through a future."""

from twinkle.errors import UserError


class MalformedRequestError(UserError):
    """The body of a request cannot be read: HTTP 400.

    If at least the model and the sequence number of an op can be read, the op is accepted and fails instead.
    ``field``: the path of the wrong field, empty if the whole body is wrong. ``problem``: pydantic's name of the
    mistake, such as "missing".
    """

    def __init__(self, message: str, field: str = "", problem: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.problem = problem


class BodyTooLargeError(UserError):
    """The body has, or decompresses to, more bytes than the limit: HTTP 413. ``unit``: what else is limited."""

    key = "max_request_bytes"

    def __init__(self, limit: int, unit: str = "bytes") -> None:
        super().__init__(f"body: larger than {limit} {unit}, allowed: at most that")


class JsonTooLargeError(BodyTooLargeError):
    """A result is too large to be sent as JSON: HTTP 413. As protobuf it can be fetched whatever its size."""

    key = "max_json_result_bytes"

    def __init__(self, size: int, limit: int) -> None:
        UserError.__init__(
            self,
            f"result: about {size} bytes as JSON, allowed: at most {limit} ({self.key}); "
            "ask for protobuf (Accept: application/x-protobuf)",
        )


class SequenceConflictError(UserError):
    """A sequence number of a native run was sent again with another request: HTTP 409. The first request stands."""

    def __init__(self, run_id: str, seq: int) -> None:
        super().__init__(f"seq_id {seq} of {run_id} was used before with another request; each request needs its own")
