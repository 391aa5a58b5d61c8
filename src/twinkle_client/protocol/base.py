"""What all messages of the native protocol share: how a JSON object is read, headers, and the answer to a mistake."""

from pydantic import BaseModel, ConfigDict

SESSION_HEADER = "X-Twinkle-Session-Id"  # of a request: the session that it belongs to
IDEMPOTENCY_HEADER = "X-Idempotency-Key"  # of a request: the same key again is the same request
NUMBER_HEADER = "X-Twinkle-Seq-Id"  # of an answer: the number that the request has in its adapter's sequence

# What a value is, where JSON alone does not say: a LoraConfig, a DatasetMeta, a Batch.
TYPE_KEY = "_TWINKLE_TYPE_"

# Codes of errors that a program reacts to. Texts are for people and may change; codes do not.
SESSION_LOST = "session_lost"  # the session that the request names has ended, or is not known


class Wire(BaseModel):
    """A JSON object. Keys that it does not name are dropped: client and server may be of different versions."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class OpenWire(Wire):
    """Keys that it does not name are arguments of the method that is called; see :meth:`arguments`."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    @property
    def arguments(self) -> dict[str, object]:
        return dict(self.__pydantic_extra__ or {})


class ErrorResponse(Wire):
    """The body of every answer with a status from 400 on.

    ``detail`` is for people. ``code`` is one of the codes above where a program has to tell this error from others of
    the same status; older servers send none.
    """

    detail: str
    code: str | None = None


class OkResponse(Wire):
    """The answer to a request that has nothing to tell but that it was done."""

    status: str = "ok"
