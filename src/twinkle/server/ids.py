"""Names: ids that we hand out, ids that come back from clients, and checkpoint addresses.

A request id carries its owner, ``<run or sampling session>:<sequence number>``, so that whoever receives one knows whom
to ask. Ids are checked for form before they are looked up; whether they exist and whose they are is the caller's
question.
"""

import re
import secrets
from dataclasses import dataclass
from typing import get_args

from twinkle.errors import InvalidInputError
from twinkle.server.types import CheckpointKind

_SCHEMES = ("tinker://", "twinkle://")
CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,19}")


def new_session_id() -> str:
    return f"s-{secrets.token_hex(16)}"


def run_id(session_id: str, number: int) -> str:
    return f"{session_id}:train:{number}"


def sampling_session_id(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def split_request_id(request_id: str) -> tuple[str, int] | None:
    """(owner, sequence number), or None for what cannot be one of ours."""
    owner, _, seq = request_id.rpartition(":")
    if not owner or not seq.isascii() or not seq.isdigit() or len(seq) > 19 or int(seq) >= 2**63:
        return None
    return owner, int(seq)


def directory_name(identifier: str) -> str:
    """A run's or sampling session's id as one path segment."""
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

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"
