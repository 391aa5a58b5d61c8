"""Every error Twinkle raises on purpose, in one tree.

A user's mistake is a :class:`UserError`: it says which field was wrong, what was given and what is allowed. Everything
else that can go wrong for a reason outside the code has a type of its own; our own mistakes raise plain Python errors.
Each type is also a standard-library type, so callers who have never heard of Twinkle catch what they expect.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

# What the package `twinkle` exports. Errors of the server are not for its users and are imported from here by name.
__all__ = [
    "AdapterExistsError",
    "AdapterNotFoundError",
    "CapacityError",
    "CheckpointError",
    "DataError",
    "DownloadError",
    "InvalidInputError",
    "MissingDependencyError",
    "NonFiniteError",
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
    """Base of all errors below. They can be pickled: worker processes of datasets and loaders send them home.

    ``code``: what programs know an error by, where they react to it. A server answers with it beside the text.
    """

    code: str | None = None

    def with_code(self, code: str) -> Self:
        self.code = code
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call __init__ with the finished message; a pool that cannot read an answer waits for it for ever.
        return _restored, (type(self), self.args, dict(vars(self)))


class UserError(TwinkleError, ValueError):
    """The caller asked for something that cannot be done as asked."""


class InvalidInputError(UserError):
    """A field of a request holds a value that is not allowed there."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: got {_short(value)}, allowed: {allowed}")
        self.field = field
        self.allowed = allowed


class LimitExceededError(InvalidInputError):
    """A field of a request holds more than a limit of the server allows; sending it again does not help."""

    def __init__(self, field: str, value: object, allowed: str, key: str) -> None:
        """``key`` names the limit: its key in the configuration."""
        super().__init__(field, value, f"{allowed} ({key})")
        self.key = key


class UnknownNameError(UserError, LookupError):
    """A name (loss, template, metric, optimizer, config key …) that nobody registered."""

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
    """A stream has no length and no rows by number. A TypeError, so that ``list(stream)`` goes on without a length."""


class CapacityError(TwinkleError, MemoryError):
    """The request does not fit the memory that this process was given."""


class CheckpointError(UserError, OSError):
    """A checkpoint directory is missing, incomplete or does not match."""


class DataError(TwinkleError, RuntimeError):
    """A dataset could not deliver a row."""


class DownloadError(TwinkleError, OSError):
    """Files could not be fetched or converted."""


class UploadError(TwinkleError, OSError):
    """A hub did not take what was sent to it."""


class MissingDependencyError(TwinkleError, ImportError):
    """An optional package is needed for this and is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r} (our extra {extra!r}): pip install {package}")


class ResourcesError(TwinkleError, RuntimeError):
    """The cluster does not have, or does not give, what the groups of a program need."""


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
    """The server cannot start, or cannot go on, the way it was told to."""


class ConfigParseError(TwinkleServerError, ValueError):
    """A configuration file is not YAML, or its top level is not a mapping."""


@dataclass(frozen=True)
class ConfigProblem:
    """One thing wrong with a configuration. ``got`` is the value as it is to be shown to people."""

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
        """All ``problems`` of the file ``source``, one a line."""
        error = cls(problems[0].field, problems[0].got, problems[0].allowed)
        error.problems = tuple(problems)
        error.args = ("\n".join(f"{source}: {problem}" for problem in problems),)
        return error


class UnauthorizedError(TwinkleServerError, PermissionError):
    """No API key, or one that nobody issued."""

    def __init__(self, wanted: str) -> None:
        super().__init__(f"API key: missing or unknown, allowed: {wanted}")


class ForbiddenError(TwinkleServerError, PermissionError):
    """A signed address that we did not sign, or not for so long."""


class NotFoundError(TwinkleServerError, LookupError):
    """Nothing of the caller's has this id. What belongs to another tenant answers just so."""

    def __init__(self, kind: str, identifier: str, note: str = "") -> None:
        """``note``: what became of it, where it is known."""
        super().__init__(f"unknown {kind} {_short(identifier)}" + (f" ({note})" if note else ""))


class UnknownCheckpointError(NotFoundError, UserError):
    """The same for a checkpoint's address, which is a field of a request rather than its target."""

    def __init__(self, path: str) -> None:
        super().__init__("checkpoint", path)


class GoneError(TwinkleServerError, LookupError):
    """It was there, and will not come back."""


class ShuttingDownError(TwinkleServerError):
    """What was asked for ends with this server. The next one may do it."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down: send the request again")


class QuotaError(TwinkleServerError, RuntimeError):
    """A tenant's limit is reached for now."""

    retry_after = 1  # seconds

    def __init__(self, what: str, used: int, limit: int, key: str, advice: str = "wait until some are done") -> None:
        """``key`` names the limit: its key in the configuration, or the name of a limit that is fixed.

        ``advice``: what the tenant can do about it.
        """
        super().__init__(f"{what}: {used} of {limit} in use ({key}); {advice}, or ask for a higher limit")
        self.key = key


class RateLimitError(QuotaError):
    """A tenant's tokens of this minute are used up, or what is left is too little for this request."""

    def __init__(self, what: str, limit: int, retry_after: int, key: str) -> None:
        message = (
            f"{what}: the limit of {limit} is reached ({key}); try again in {retry_after} s, or ask for a higher limit"
        )
        TwinkleServerError.__init__(self, message)
        self.retry_after = retry_after
        self.key = key


class OverloadedError(TwinkleServerError, MemoryError):
    """The whole server is short of a resource for now, whoever asks: HTTP 503 with Retry-After."""

    def __init__(self, what: str, used: int, limit: int, key: str, retry_after: int = 5) -> None:
        """``key`` names the limit, as in :class:`QuotaError`."""
        super().__init__(f"{what}: {used} of {limit} in use on this server ({key}); try again in {retry_after} s")
        self.key = key
        self.retry_after = retry_after


class StorageQuotaError(UserError, RuntimeError):
    """What a tenant wants to keep does not fit the disk space that it may use."""

    def __init__(self, used: int, wanted: int, limit: int) -> None:
        super().__init__(
            f"max_checkpoint_bytes_per_tenant: {used} bytes of checkpoints are kept, and {wanted} more would pass the "
            f"limit of {limit}; nothing was saved: delete checkpoints or ask for a higher limit"
        )


def _restored(kind: type[TwinkleError], args: tuple[object, ...], attributes: Mapping[str, object]) -> TwinkleError:
    native: Any = kind
    while native.__module__ != "builtins":  # of several standard types among the bases, the one that makes the object
        native = native.__base__
    error: TwinkleError = native.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
