"""Names: ids that we hand out, ids that come back from clients, and checkpoint addresses.

A request id carries its owner, ``<run or sampling session>:<sequence number>``, so that whoever receives one knows whom
to ask. Runs of Tinker's protocol are ``<session>:train:<number>``, those of ours ``<session>-<adapter name>``. Ids are
checked for form before they are looked up; whether they exist and whose they are is the caller's question.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import get_args

from twinkle.errors import InvalidInputError, NotFoundError
from twinkle.server.types import CheckpointKind

_SCHEMES = ("tinker://", "twinkle://")
CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_NATIVE_SESSION = r"session_[0-9a-f]{32}"
_NATIVE_RUN = re.compile(rf"{_NATIVE_SESSION}-{ADAPTER_NAME.pattern}")
_TINKER_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,19}")
_RUN = re.compile(rf"{_TINKER_RUN.pattern}|{_NATIVE_RUN.pattern}")
_OF_NATIVE_SESSION = re.compile(rf"{_NATIVE_SESSION}:.*")
_LIKE_TINKERS = re.compile(r"[^:]*-(train|sample)-[0-9]+")
# A client of a sampling session has so many sequence numbers: the original one the first, each copy the next ones.
SEQ_IDS_PER_CLIENT = 10**9
# Requests of a run that have no place in its sequence have numbers beyond any: one to unload it, then all refusals.
UNLOAD_NUMBER = 10**18 - 1
_REFUSED_FROM = 10**18


def new_session_id() -> str:
    return f"s-{secrets.token_hex(16)}"


def new_native_session_id() -> str:
    return f"session_{secrets.token_hex(16)}"


def native_run_id(session_id: str, adapter_name: str) -> str:
    if not ADAPTER_NAME.fullmatch(adapter_name):
        raise InvalidInputError(
            "adapter_name", adapter_name, "up to 64 of A-Z a-z 0-9 . _ - which begin with a letter, a digit or _"
        )
    return f"{session_id}-{adapter_name}"


def is_native_run(run: str) -> bool:
    return _NATIVE_RUN.fullmatch(run) is not None


def is_tinker_run(run: str) -> bool:
    return _TINKER_RUN.fullmatch(run) is not None


def native_run_number(adapter_name: str) -> int:
    """Runs of a session are told apart by a number as well; names have none, so it is drawn from the name."""
    return int.from_bytes(hashlib.blake2b(adapter_name.encode(), digest_size=8).digest()) >> 1


def run_id(session_id: str, number: int) -> str:
    return f"{session_id}:train:{number}"


def sampling_session_id(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def custom_loss_id(session_id: str, number: int) -> str:
    """Of the loss, and of the request that creates it."""
    return f"{session_id}:loss:{number}"


@dataclass(frozen=True)
class RequestId:
    """``<owner>:<number>``: the name of an op, a sample or a custom loss, which its client polls.

    Text that comes from a client is parsed once, where it arrives. It is text again on the wire, in the database, and
    as the key of a future.
    """

    owner: str  # a run, a sampling session, or a session with ``:loss`` behind it
    number: int

    @classmethod
    def parse_or_none(cls, text: str) -> "RequestId | None":
        """Return None for what cannot be one of ours."""
        owner, _, number = text.rpartition(":")
        if not owner or not number.isascii() or not number.isdigit() or len(number) > 19 or int(number) >= 2**63:
            return None
        if number != str(int(number)):
            return None
        return cls(owner, int(number))

    @classmethod
    def parse(cls, text: str) -> "RequestId":
        """Raise NotFoundError for what cannot be one of ours: a client learns no more about ids than that."""
        parsed = cls.parse_or_none(text)
        if parsed is None:
            raise NotFoundError("request", text)
        return parsed

    @classmethod
    def for_unload(cls, run_id: str) -> "RequestId":
        return cls(run_id, UNLOAD_NUMBER)

    @classmethod
    def for_refusal(cls, run_id: str, count: int) -> "RequestId":
        """Return the id of a request that was refused before it had a place; ``count`` of them came before."""
        return cls(run_id, _REFUSED_FROM + count)

    @property
    def is_sample(self) -> bool:
        return ":sample:" in self.owner

    @property
    def is_custom_loss(self) -> bool:
        return self.owner.endswith(":loss")

    @property
    def is_unload(self) -> bool:
        return self.number == UNLOAD_NUMBER

    @property
    def is_refusal(self) -> bool:
        return self.number >= _REFUSED_FROM

    @property
    def client(self) -> tuple[str, int]:
        """Return the sampling session and which of its clients made the request."""
        return self.owner, self.number // SEQ_IDS_PER_CLIENT

    def __str__(self) -> str:
        return f"{self.owner}:{self.number}"


def directory_name(identifier: str) -> str:
    """A run's or sampling session's id as one path segment, and no other's.

    A colon becomes a dash, unless another id could be meant then: Tinker's run 0 of a native session, and its native
    adapter called ``train-0``. Such ids get plus signs, which no id has. Earlier versions gave one directory to both of
    them; what lies there is found by its record.
    """
    if _OF_NATIVE_SESSION.fullmatch(identifier):
        return identifier.replace(":", "+")
    if _LIKE_TINKERS.fullmatch(identifier):
        return f"{identifier}+"
    return identifier.replace(":", "-")


@dataclass(frozen=True)
class CheckpointPath:
    """``tinker://<run>/<kind>/<name>``."""

    run_id: str
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, text: str, field: str = "path") -> "CheckpointPath":
        for scheme in _SCHEMES:
            if text.startswith(scheme):
                return cls.of(text.removeprefix(scheme).split("/"), text, field)
        raise InvalidInputError(field, text, "tinker://<run>/<weights|sampler_weights>/<name>")

    @classmethod
    def of(cls, segments: list[str], text: str, field: str) -> "CheckpointPath":
        if len(segments) == 3:
            run, kind, name = segments
            for known in get_args(CheckpointKind):
                if kind == known and _RUN.fullmatch(run) and CHECKPOINT_NAME.fullmatch(name):
                    return cls(run, known, name)
        raise InvalidInputError(field, text, "tinker://<run>/<weights|sampler_weights>/<name>")

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def native(self) -> str:
        """The address that our own protocol shows; both are accepted everywhere."""
        return f"twinkle://{self.run_id}/{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"
