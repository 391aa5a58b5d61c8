"""The clock by which a group finds a rank that hangs: how long a call of the ranks may take.

A rank that hangs lets all others wait in their next collective operation, whose own timeout is two hours. A call may
take ``factor`` times the median of earlier calls like it, and never less than ``least`` seconds. Nothing here calls Ray
or reads the time.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from statistics import median

_FIRST_CALLS = 3  # of a kind: they may compile, allocate or read files, and there is no median yet …
_FIRST_FACTOR = 10  # … so they may take this many times ``least``
_KEPT_CALLS = 64  # of each kind
_KEPT_KINDS = 1024


@dataclass(frozen=True)
class Work:
    """What the ranks are asked to do.

    ``kind``: the method, and the adapter where its size decides how long the call takes. ``tokens`` and ``pairs`` are
    the size of a pass: all tokens, and the squares of the sequences' lengths, which attention needs.
    """

    kind: str
    tokens: int = 0
    pairs: int = 0

    def times_larger(self, other: "Work") -> float:
        """Return how many times longer than ``other`` this may take, at most.

        The time of a pass has a constant part, one that grows with tokens, and one that grows with pairs.
        """
        return max(1.0, self.tokens / max(1, other.tokens), self.pairs / max(1, other.pairs))


class StepClock:
    """Knows how long earlier calls took. Belongs to the thread that calls the ranks."""

    def __init__(self, factor: float, least: float) -> None:
        self._factor = factor
        self._least = least
        self._measured: OrderedDict[str, deque[tuple[Work, float]]] = OrderedDict()

    def allowed(self, work: Work) -> float:
        """Return the seconds after which a rank that has not answered counts as hung."""
        earlier = [seconds * work.times_larger(other) for other, seconds in self._measured.get(work.kind, ())]
        if len(earlier) < _FIRST_CALLS:
            return max(_FIRST_FACTOR * self._least, self._factor * max(earlier, default=0.0))
        return max(self._least, self._factor * median(earlier))

    def measure(self, work: Work, seconds: float) -> None:
        """Note how long a call took that all ranks have answered."""
        self._measured.setdefault(work.kind, deque(maxlen=_KEPT_CALLS)).append((work, seconds))
        self._measured.move_to_end(work.kind)
        while len(self._measured) > _KEPT_KINDS:
            self._measured.popitem(last=False)
