"""Ids and checkpoint addresses: how the server makes them, and how it parses those that clients send.

A request id contains its owner, ``<run or sampling session>:<sequence number>``, so that any part of the server can
tell from the id which service handles it. A run of Tinker's protocol has the id ``<session>:train:<number>``, a run of
the native protocol ``<session>-<adapter name>``. This module checks only the form of an id; the caller checks that it
exists and which tenant owns it.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass, field, replace
from typing import get_args

from twinkle.errors import InvalidInputError, NotFoundError
from twinkle.server.types import CheckpointKind

_SCHEMES = ("tinker://", "twinkle://")
CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_NATIVE_SESSION = r"session_[0-9a-f]{32}"
_NATIVE_RUN = re.compile(rf"{_NATIVE_SESSION}-{ADAPTER_NAME.pattern}")
_TINKER_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,19}")
# The run in the address of a checkpoint. Ids of other servers have other forms than ours: such a run is unknown here,
# but its address is well formed.
_ADDRESSED_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,255}")
_OF_NATIVE_SESSION = re.compile(rf"{_NATIVE_SESSION}:.*")
_LIKE_TINKERS = re.compile(r"[^:]*-(train|sample)-[0-9]+")
# Each client of a sampling session has this many sequence numbers: the original client those from 0 on, its first copy
# in another process those from 10**9 on, and so on.
SEQ_IDS_PER_CLIENT = 10**9
# Requests of a run that have no place in its sequence get numbers above all sequence numbers: one number for unloading
# the run, and the numbers after it for refusals.
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
    """Return the run's number within its session. An adapter name has no number, so it is a hash of the name."""
    return int.from_bytes(hashlib.blake2b(adapter_name.encode(), digest_size=8).digest()) >> 1


def run_id(session_id: str, number: int) -> str:
    return f"{session_id}:train:{number}"


def sampling_session_id(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def custom_loss_id(session_id: str, number: int) -> str:
    """Return the id of a custom loss, which is also the id of the request that creates it."""
    return f"{session_id}:loss:{number}"


@dataclass(frozen=True)
class RequestId:
    """``<owner>:<number>``: the name of an op, a sample, a custom loss, an unloading or a refusal, which its client
    polls.

    An id that a client sends is parsed once, where it arrives. On the wire, in the database and as the key of a future
    it is text.
    """

    owner: str  # a run id, a sampling session id, or ``<session>:loss``
    number: int

    @classmethod
    def parse_or_none(cls, text: str) -> "RequestId | None":
        """Return the parsed id, or None if the text does not have the form of a request id."""
        owner, _, number = text.rpartition(":")
        if not owner or not number.isascii() or not number.isdigit() or len(number) > 19 or int(number) >= 2**63:
            return None
        if number != str(int(number)):
            return None
        return cls(owner, int(number))

    @classmethod
    def parse(cls, text: str) -> "RequestId":
        """Return the parsed id. Raise NotFoundError if the text has another form: the same error as for an unknown id,
        so that clients cannot probe the form of ids.
        """
        parsed = cls.parse_or_none(text)
        if parsed is None:
            raise NotFoundError("request", text)
        return parsed

    @classmethod
    def for_unload(cls, run_id: str) -> "RequestId":
        return cls(run_id, UNLOAD_NUMBER)

    @classmethod
    def for_refusal(cls, run_id: str, count: int) -> "RequestId":
        """Return the id of a request that was refused before it got a place in the sequence.

        ``count`` is the number of such refusals that the training service has made before this one.
        """
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
        """Return the sampling session and the number of its client that made the request (0: the original client)."""
        return self.owner, self.number // SEQ_IDS_PER_CLIENT

    def __str__(self) -> str:
        return f"{self.owner}:{self.number}"


def directory_name(identifier: str) -> str:
    """Return the id of a run or sampling session as one path segment. No two ids have the same segment.

    A colon becomes a dash, unless another id would give the same name. Example: Tinker's run ``<session>:train:0`` of a
    native session, and the native run ``<session>-train-0`` of an adapter called ``train-0``. The names of such ids get
    plus signs, which no id contains. Earlier versions of the server gave both runs one directory; their files are found
    by the paths in their records.
    """
    if _OF_NATIVE_SESSION.fullmatch(identifier):
        return identifier.replace(":", "+")
    if _LIKE_TINKERS.fullmatch(identifier):
        return f"{identifier}+"
    return identifier.replace(":", "-")


@dataclass(frozen=True)
class CheckpointPath:
    """The address of a checkpoint: ``tinker://<run>/<kind>/<name>``, or the same with ``twinkle://``."""

    run_id: str
    kind: CheckpointKind
    name: str
    scheme: str = field(default=_SCHEMES[0], compare=False)  # with which a client sent it; both mean the same

    @classmethod
    def parse(cls, text: str, field: str = "path") -> "CheckpointPath":
        """Return the parsed address. Raise InvalidInputError, which names ``field``, if the text is not an address."""
        for scheme in _SCHEMES:
            if text.startswith(scheme):
                return replace(cls.from_segments(text.removeprefix(scheme).split("/"), text, field), scheme=scheme)
        raise InvalidInputError(field, text, "tinker://<run>/<weights|sampler_weights|external_weights>/<name>")

    @classmethod
    def from_segments(cls, segments: list[str], text: str, field: str) -> "CheckpointPath":
        """Return the address with the segments run, kind and name. Errors show ``text`` as the value of ``field``."""
        if len(segments) == 3:
            run, kind, name = segments
            for known in get_args(CheckpointKind):
                if kind == known and _ADDRESSED_RUN.fullmatch(run) and CHECKPOINT_NAME.fullmatch(name):
                    return cls(run, known, name)
        raise InvalidInputError(field, text, "tinker://<run>/<weights|sampler_weights|external_weights>/<name>")

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def as_sent(self) -> str:
        """Return the address as the client wrote it, for errors."""
        return f"{self.scheme}{self.run_id}/{self.kind}/{self.name}"

    @property
    def native(self) -> str:
        """Return the address as the native protocol shows it. :meth:`parse` accepts both schemes."""
        return f"twinkle://{self.run_id}/{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"
