"""The base class of Twinkle's errors, and most of these errors. Packages of the server define further ones.

A user's mistake is usually a :class:`UserError`; the most common one, :class:`InvalidInputError`, says which field was
wrong, what was given and what is allowed. Failures with other causes outside the code have types of their own. Each
type is also a standard-library type, so that code which does not know Twinkle can catch it. The client's errors are in
``twinkle_client.errors`` and have a base class of their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

# The errors that the package `twinkle` exports. Errors of the server are not exported; import them from this module.
__all__ = [
    "AdapterExistsError",
    "AdapterNotFoundError",
    "CapacityError",
    "CheckpointError",
    "DataError",
    "DownloadError",
    "InvalidInputError",
    "MissingDependencyError",
    "NoOptimizerStateError",
    "NonFiniteError",
    "RankFailedError",
    "ResourcesError",
    "StreamError",
    "TwinkleError",
    "UnknownNameError",
    "UnsupportedError",
    "UploadError",
    "UserError",
    "WorkerDiedError",
    "WorkerTimeoutError",
]


class TwinkleError(Exception):
    """The base of Twinkle's errors. They can be pickled, because worker processes of datasets and loaders return them.

    ``code``: a stable identifier for errors that programs react to. A server sends it beside the error's text.
    """

    code: str | None = None

    def with_code(self, code: str) -> Self:
        self.code = code
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # By default unpickling would call __init__ with the finished message and fail; a process pool that cannot
        # unpickle an answer waits for ever.
        return _restored, (type(self), self.args, dict(vars(self)))


class UserError(TwinkleError, ValueError):
    """The caller asked for something that cannot be done as asked."""


class InvalidInputError(UserError):
    """An argument, a field of a request or a variable holds a value that is not allowed there."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: got {_short(value)}, allowed: {allowed}")
        self.field = field
        self.allowed = allowed

    def renamed(self, field: str) -> Self:
        """Return the same error with the name that the caller has given the field."""
        other = copy(self)
        other.args = (f"{field}{str(self).removeprefix(self.field)}",)
        other.field = field
        return other


class LimitExceededError(InvalidInputError):
    """A field of a request exceeds a limit of the server; sending the request again does not help."""

    def __init__(self, field: str, value: object, allowed: str, key: str) -> None:
        """``key`` names the limit: its key in the configuration."""
        super().__init__(field, value, f"{allowed} ({key})")
        self.key = key


class UnknownNameError(UserError, LookupError):
    """A name (loss, template, metric, optimizer, config key …) that is not registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")
        self.kind = kind
        self.name = name


class AdapterNotFoundError(UserError, LookupError):
    """No adapter has this id."""

    def __init__(self, adapter_id: str) -> None:
        super().__init__(f"adapter_id: no adapter {adapter_id!r} on this trainer")
        self.adapter_id = adapter_id


class AdapterExistsError(UserError):
    """An adapter with this id exists already."""

    def __init__(self, adapter_id: str) -> None:
        super().__init__(f"adapter_id: an adapter {adapter_id!r} exists already; remove it first or choose another id")
        self.adapter_id = adapter_id


class NonFiniteError(UserError, ArithmeticError):
    """The computation of one request produced NaN or infinity; nothing of it was kept."""


class UnsupportedError(UserError, NotImplementedError):
    """A model, option or combination that Twinkle does not implement (yet)."""


class StreamError(UnsupportedError, TypeError):
    """A stream was asked for its length or for a row by number.

    It is a TypeError because ``list(stream)`` ignores that error of ``len`` and reads the stream.
    """


class CapacityError(TwinkleError, MemoryError):
    """A request, adapter or version does not fit into the memory, or the number of adapters, of this process."""


class CheckpointError(UserError, OSError):
    """A checkpoint directory is missing, incomplete, damaged or does not match, exists already or cannot be written."""


class NoOptimizerStateError(CheckpointError):
    """A checkpoint has weights and no optimizer state, which was asked for."""


class DataError(TwinkleError, RuntimeError):
    """A dataset could not deliver a row or a pack of rows."""


class DownloadError(TwinkleError, OSError):
    """A model or dataset could not be looked up, downloaded or kept in the cache."""


class UploadError(TwinkleError, OSError):
    """Logging in to a hub, creating a repository there or uploading to it failed."""


class MissingDependencyError(TwinkleError, ImportError):
    """An optional package is needed for this and is not installed. :mod:`twinkle.extras` raises it."""

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        """``extra``: our extra that installs the package; None if none does."""
        named, wanted = ("", package) if extra is None else (f" (our extra {extra!r})", f"twinkle-posttrain[{extra}]")
        super().__init__(f"{purpose} needs the package {package!r}{named}: pip install '{wanted}'")


class ResourcesError(TwinkleError, RuntimeError):
    """The cluster does not have the resources that the groups of a program need, or they are in use."""


class RankFailedError(TwinkleError, RuntimeError):
    """One of several processes that compute together failed, so none of them can go on."""

    def __init__(self, failure: str) -> None:
        """``failure``: the number of the process that failed first, and its error."""
        super().__init__(f"{failure}\n(no process of the group can continue)")


class WorkerDiedError(TwinkleError, RuntimeError):
    """A process of a worker group ended before it answered."""

    def __init__(self, component: str, group: str, method: str, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} of group {group!r} died during {component!r}.{method}: {reason}")
        self.group = group
        self.rank = rank


class WorkerTimeoutError(TwinkleError, TimeoutError):
    """Processes of a worker group did not answer in time."""

    def __init__(self, component: str, group: str, method: str, ranks: Sequence[int], seconds: float) -> None:
        late = ", ".join(map(str, ranks))
        super().__init__(f"no answer from rank {late} of group {group!r} to {component!r}.{method} in {seconds} s")
        self.group = group
        self.ranks = tuple(ranks)


# --- the server -------------------------------------------------------------------------------------------------------


class TwinkleServerError(TwinkleError, RuntimeError):
    """The base of most errors of the server; raised itself if the server or a command cannot do what was asked."""


class ConfigParseError(TwinkleServerError, ValueError):
    """A configuration file is not YAML, or its top level is not a mapping."""


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in a configuration. ``got`` is the value as it is shown to people."""

    field: str
    got: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.field}: got {self.got}, allowed: {self.allowed}"


class ConfigError(TwinkleServerError, ValueError):
    """Keys of a configuration hold values that are not allowed there. ``problems`` has one entry for each."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.problems: tuple[ConfigProblem, ...] = (ConfigProblem(field, _short(value), allowed),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def from_problems(cls, problems: Sequence[ConfigProblem], source: str) -> "ConfigError":
        """Return an error that lists all ``problems`` of the file ``source``, one per line."""
        error = cls(problems[0].field, problems[0].got, problems[0].allowed)
        error.problems = tuple(problems)
        error.args = ("\n".join(f"{source}: {problem}" for problem in problems),)
        return error


class UnauthorizedError(TwinkleServerError, PermissionError):
    """The API key or token of a request is missing, unknown, expired, or not accepted here."""

    def __init__(self, wanted: str) -> None:
        super().__init__(f"API key: missing or unknown, allowed: {wanted}")


class ForbiddenError(TwinkleServerError, PermissionError):
    """The signature of a signed URL is wrong, the URL has expired, or the key that it was made with was revoked."""


class NotFoundError(TwinkleServerError, LookupError):
    """The caller has nothing with this id. An id of another tenant gets the same answer as one that does not exist."""

    def __init__(self, kind: str, identifier: str, note: str = "") -> None:
        """``note``: what happened to it, if that is known."""
        super().__init__(f"unknown {kind} {_short(identifier)}" + (f" ({note})" if note else ""))


class UnknownCheckpointError(NotFoundError, UserError):
    """The caller has no checkpoint with this address.

    A UserError as well, because the address is a field of a request rather than the target of the request.
    """

    def __init__(self, path: str) -> None:
        super().__init__("checkpoint", path)


class GoneError(TwinkleServerError, LookupError):
    """The object that the request names existed once and will not come back."""


class ShuttingDownError(TwinkleServerError):
    """The request was not finished because the server is shutting down. The next process may accept it."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down: send the request again")


class QuotaError(TwinkleServerError, RuntimeError):
    """A limit is reached, of the tenant or of what all tenants share; the same request may succeed later."""

    retry_after = 1  # seconds

    def __init__(self, what: str, used: int, limit: int, key: str, advice: str = "wait until some are done") -> None:
        """``key`` names the limit: its key in the configuration, or the name of a limit that is fixed.

        ``advice``: what the tenant can do about it.
        """
        super().__init__(f"{what}: {used} of {limit} in use ({key}); {advice}, or ask for a higher limit")
        self.key = key


class LimitReachedError(QuotaError):
    """A limit on what a tenant keeps is full: its adapters, sessions or processors.

    The request succeeds only after the tenant gave up one of them, so clients do not retry it by themselves. A limit
    that tenants share is no case of this error: another tenant may give something up, so waiting helps.
    """

    code = "limit_reached"


class RateLimitError(QuotaError):
    """A tenant's tokens of this minute are used up, or too few are left for this request."""

    def __init__(self, what: str, limit: int, retry_after: int, key: str) -> None:
        message = (
            f"{what}: the limit of {limit} is reached ({key}); try again in {retry_after} s, or ask for a higher limit"
        )
        TwinkleServerError.__init__(self, message)
        self.retry_after = retry_after
        self.key = key


class OverloadedError(TwinkleServerError, MemoryError):
    """The whole server is short of a resource at the moment, for all tenants: HTTP 503 with Retry-After."""

    def __init__(self, what: str, used: int, limit: int, key: str, retry_after: int = 5) -> None:
        """``key`` names the limit, as in :class:`QuotaError`."""
        super().__init__(f"{what}: {used} of {limit} in use on this server ({key}); try again in {retry_after} s")
        self.key = key
        self.retry_after = retry_after


class StorageQuotaError(UserError, RuntimeError):
    """A checkpoint does not fit into the disk space that its tenant may use."""

    def __init__(self, used: int, wanted: int, limit: int) -> None:
        super().__init__(
            f"max_checkpoint_bytes_per_tenant: {used} bytes of checkpoints are kept, and {wanted} more would pass the "
            f"limit of {limit}; nothing was saved: delete checkpoints or ask for a higher limit"
        )


def _restored(kind: type[TwinkleError], args: tuple[object, ...], attributes: Mapping[str, object]) -> TwinkleError:
    native: Any = kind
    while native.__module__ != "builtins":  # find the built-in base class, whose __new__ makes the object
        native = native.__base__
    error: TwinkleError = native.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
