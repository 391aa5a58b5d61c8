"""How fast something grows, over about the last minute."""

from collections import deque

_SECONDS = 60.0


class RecentRate:
    """Of a total that only grows. ``note`` it now and then: as often as the rate is to be up to date."""

    def __init__(self, now: float) -> None:
        self._notes: deque[tuple[float, int]] = deque([(now, 0)])  # when and how much, oldest first

    def note(self, total: int, now: float) -> None:
        self._notes.append((now, total))
        while len(self._notes) > 1 and now - self._notes[1][0] >= _SECONDS:
            self._notes.popleft()

    def rate(self, total: int, now: float) -> float:
        """A second, since a minute ago or since the start."""
        at, before = self._notes[0]
        return round((total - before) / max(now - at, 1.0), 1)
