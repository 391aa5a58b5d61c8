"""Requests that the HTTP layer refuses by status code, because no future can carry the refusal."""

from twinkle.errors import UserError


class MalformedRequestError(UserError):
    """The body cannot be read, or not far enough to know what it is about: HTTP 400."""


class BodyTooLargeError(UserError):
    """The body is, or unpacks to, more than is accepted: HTTP 413."""

    key = "max_request_bytes"

    def __init__(self, limit: int) -> None:
        super().__init__(f"body: larger than {limit} bytes, allowed: at most that")
        self.limit = limit
