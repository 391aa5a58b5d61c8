"""What a tenant may know of an adapter of its own while it lives: where it is, and what waits for it."""

from dataclasses import dataclass
from typing import Literal

# "device": in a slot of the trainer; "host": paged out to the machine's memory; "disk": in its snapshot until its next
# request; "nowhere": not created yet; "parked": its session ended, a checkpoint has it; "failed": never created.
Whereabouts = Literal["device", "host", "disk", "nowhere", "parked", "failed"]


@dataclass(frozen=True)
class AdapterStatus:
    where: Whereabouts
    queued_ops: int  # accepted and not ended


@dataclass(frozen=True)
class QueueStatus:
    """Of one base model: ops that wait, of one tenant and of all."""

    own: int
    all: int
