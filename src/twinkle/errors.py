"""Every error Twinkle raises on purpose, in one tree.

A user's mistake is a :class:`UserError`: it says which field was wrong, what was given and what is allowed. Everything
else that can go wrong for a reason outside the code has a type of its own; our own mistakes raise plain Python errors.
Each type is also a standard-library type, so callers who have never heard of Twinkle catch what they expect.
"""

from collections.abc import Iterable

__all__ = [
    "AdapterExistsError",
    "AdapterNotFoundError",
    "CapacityError",
    "CheckpointError",
    "DownloadError",
    "InvalidInputError",
    "MissingDependencyError",
    "NonFiniteError",
    "TwinkleError",
    "UnknownNameError",
    "UnsupportedError",
    "UserError",
]


class TwinkleError(Exception):
    """Base of all errors below."""


class UserError(TwinkleError, ValueError):
    """The caller asked for something that cannot be done as asked."""


class InvalidInputError(UserError):
    """A field of a request holds a value that is not allowed there."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: got {_short(value)}, allowed: {allowed}")
        self.field = field
        self.allowed = allowed


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


class CapacityError(TwinkleError, MemoryError):
    """The request does not fit the memory that this process was given."""


class CheckpointError(UserError, OSError):
    """A checkpoint directory is missing, incomplete or does not match."""


class DownloadError(TwinkleError, OSError):
    """Model files could not be fetched or converted."""


class MissingDependencyError(TwinkleError, ImportError):
    """An optional package is needed for this and is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r} (our extra {extra!r}): pip install {package}")


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
