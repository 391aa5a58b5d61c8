"""Errors of this protocol: ``{"error": {"message", "type", "param", "code"}}`` and a status code."""

from dataclasses import dataclass

from twinkle.errors import (
    CapacityError,
    GoneError,
    InvalidInputError,
    OverloadedError,
    QuotaError,
    ShuttingDownError,
    TwinkleError,
    UnauthorizedError,
    UserError,
)
from twinkle.server.state.errors import DatabaseUnavailableError
from twinkle.server.wire.errors import BodyTooLargeError
from twinkle.server.wire.fields import short

# What the sampler calls things that have another name in this protocol.
_PARAMS = {"num_samples": "n", "topk_sample_logprobs": "top_logprobs", "stop_strings": "stop", "stop_tokens": "stop"}


class RequestError(UserError):
    """A field of a request is missing, unknown, or holds what this server does not offer."""

    def __init__(self, message: str, param: str | None, code: str) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFoundError(UserError):
    """There is nothing to sample from under this name. What belongs to another tenant answers just so."""


def unknown_model(name: str) -> ModelNotFoundError:
    listing = "GET /v1/models lists base models and what is yours"
    return ModelNotFoundError(f"unknown model {short(name)}; {listing}")


@dataclass(frozen=True)
class Refusal:
    """An error as the client sees it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    @property
    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def refusal_of(error: TwinkleError) -> Refusal | None:
    """Return how an error is answered; None for a failure of the server, of which the client gets no details."""
    text = str(error)
    match error:
        case UnauthorizedError():
            return Refusal(401, text, code="invalid_api_key")
        case ModelNotFoundError():
            return Refusal(404, text, param="model", code="model_not_found")
        case BodyTooLargeError():
            return Refusal(413, text)
        case QuotaError():
            return Refusal(429, text, "rate_limit_error", code="rate_limit_exceeded")
        case GoneError() | CapacityError() | OverloadedError() | ShuttingDownError() | DatabaseUnavailableError():
            # The next try may go well.
            return Refusal(503, text, "server_error")
        case RequestError():
            return Refusal(400, text, param=error.param, code=error.code)
        case InvalidInputError():
            return Refusal(400, text, param=_PARAMS.get(error.field, error.field), code="invalid_value")
        case UserError():
            return Refusal(400, text)
        case _:
            return None


INTERNAL = Refusal(500, "internal error; the server's log has the details", "server_error")
