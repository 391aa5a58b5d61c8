"""A tenant's place among others when there is more to do than can be done at once."""

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Priority", "Standing"]


class Priority(IntEnum):
    """Work of a higher class goes first, but for every few turns of it those below get one."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True)
class Standing:
    """``weight``: of two tenants of one class that always have work, one with twice the weight gets twice as much."""

    weight: float = 1.0
    priority: Priority = Priority.NORMAL
