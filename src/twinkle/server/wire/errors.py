"""Requests that the HTTP layer refuses by status code, because no future can carry the refusal."""

from twinkle.errors import UserError


class MalformedRequestError(UserError):
    """The body cannot be read, or not far enough to know what it is about: HTTP 400.

    ``field``: the path of what is wrong, empty if that is the whole body. ``problem``: what pydantic calls the mistake.
    """

    def __init__(self, message: str, field: str = "", problem: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.problem = problem


class BodyTooLargeError(UserError):
    """The body is, or unpacks to, more than is accepted: HTTP 413."""

    key = "max_request_bytes"

    def __init__(self, limit: int) -> None:
        super().__init__(f"body: larger than {limit} bytes, allowed: at most that")


class JsonTooLargeError(BodyTooLargeError):
    """A result would be more JSON than is written: HTTP 413. As protobuf any result can be had."""

    key = "max_json_result_bytes"

    def __init__(self, size: int, limit: int) -> None:
        UserError.__init__(
            self,
            f"result: about {size} bytes as JSON, allowed: at most {limit} ({self.key}); "
            "ask for protobuf (Accept: application/x-protobuf)",
        )


class SequenceConflictError(UserError):
    """A number of a native adapter came back with another request; the first one stands."""

    def __init__(self, run_id: str, seq: int) -> None:
        super().__init__(f"seq_id {seq} of {run_id} was used before with another request; each request needs its own")
