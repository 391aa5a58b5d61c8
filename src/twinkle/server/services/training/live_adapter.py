"""What the model service knows of an adapter beside its ops, and of an op on its way through the device."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from twinkle.server.scheduling.sequence import Ticket
from twinkle.server.services.training.adapter_status import Whereabouts
from twinkle.server.services.training.recovery import Replay
from twinkle.server.types import Op, RunRecord


class Place(StrEnum):
    """Where an adapter is."""

    NOWHERE = "nowhere"  # it was not created yet, or could not be
    DISK = "disk"  # in its snapshot only
    TRAINER = "trainer"


@dataclass
class LiveAdapter:
    """What the service knows of an adapter beside its ops."""

    run: RunRecord
    place: Place
    last_request_at: float = 0.0
    highest_seq: int = 0
    unrecorded: set[int] = field(default_factory=set)  # ops whose outcome could not be written down yet
    ops: dict[int, Op] = field(default_factory=dict)  # accepted and not finished, by sequence number
    replays: dict[int, Replay] = field(default_factory=dict)  # what a restart left to do (again), in order
    op_ended: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever one of its ops ends
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it comes from disk
    numbering: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while an op without a number gets one
    changed_seq: int = 0  # the last op that gave it other weights
    used_at: float = 0.0  # when it was last brought to the trainer or an op of it ended, by the monotonic clock
    users: int = 0  # who relies on its being in the trainer beside its ops
    versions: list[str] = field(default_factory=list)  # for sampling, of its newest weights last

    @property
    def repeats(self) -> bool:
        """Whether ops that had ended before a restart are still to be done again."""
        return any(replay.ended for replay in self.replays.values())

    @property
    def unfinished(self) -> set[int]:
        """The numbers of all ops that were accepted and have not ended, or have to end once more after a restart."""
        return {*self.ops, *self.replays}

    def take_undecoded(self) -> list[Op]:
        """Take out, without their bodies, what a restart left to do and nobody has decoded yet."""
        left = [seq for seq in self.replays if seq not in self.ops]
        return [self.replays.pop(seq).without_body() for seq in left]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the adapter in the trainer, once it is there."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    async def next_end(self) -> None:
        """Returns when one more of its ops has ended."""
        self.op_ended.clear()
        await self.op_ended.wait()


def whereabouts(adapter: LiveAdapter, resident: bool) -> Whereabouts:
    """``resident``: whether the trainer has it on the device."""
    if adapter.place is Place.TRAINER:
        return "device" if resident else "host"
    return "disk" if adapter.place is Place.DISK else "nowhere"


@dataclass
class Task:
    """An op on its way through the device. The adapter may leave the service meanwhile."""

    ticket: Ticket
    adapter: LiveAdapter
    op: Op
    finished: bool = False
    in_background: bool = False  # it ends by itself, whatever becomes of its batch
