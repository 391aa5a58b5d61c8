"""The base of all messages of the native protocol: how a JSON object is read, headers, and the body of errors."""

from pydantic import BaseModel, ConfigDict

SESSION_HEADER = "X-Twinkle-Session-Id"  # in a request: the session that it belongs to
IDEMPOTENCY_HEADER = "X-Idempotency-Key"  # in a request: the same key again means the same request
NUMBER_HEADER = "X-Twinkle-Seq-Id"  # in an answer: the sequence number of the request in its adapter's run

# The key that names the type of a JSON object: LoraConfig, DatasetMeta or Batch.
TYPE_KEY = "_TWINKLE_TYPE_"

# Codes of errors that programs react to. The texts of errors may change; codes do not.
LIMIT_REACHED = "limit_reached"  # a limit of the tenant is full, until something is given up; waiting does not help
SESSION_LOST = "session_lost"  # the session that the request names has ended, or is not known


class Wire(BaseModel):
    """A JSON object. Unknown keys are dropped, because client and server may have different versions."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class OpenWire(Wire):
    """A JSON object whose unknown keys are arguments of the method that is called; see :meth:`arguments`."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    @property
    def arguments(self) -> dict[str, object]:
        return dict(self.__pydantic_extra__ or {})


class ErrorResponse(Wire):
    """The body of the native protocol's answers with a status from 400 on.

    ``detail`` is a text for people. ``code`` is one of the codes of this module, if programs have to tell this error
    from others with the same status; older servers send none.
    """

    detail: str
    code: str | None = None


class OkResponse(Wire):
    """The answer to a request that succeeded and has no result."""

    status: str = "ok"
