"""What the answers of a group's ranks mean. A group fails and restarts as a whole.

If a rank dies, hangs, fails alone, or answers something else than the others, the ranks are no longer in the same
state, and nothing that they answer can be trusted. Then the replica's process ends. Ray kills the actors of a process
that has ended, also those that hang in a collective operation or are stopped; Serve starts another replica, and journal
and snapshots bring back all acknowledged ops. No answer of the call is used, so nothing is answered wrongly.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from twinkle.infra.device_mesh import DeviceMesh
from twinkle.server.runtime.ray.actors.answers import Answer, BrokenGroup
from twinkle.server.runtime.ray.actors.step_clock import StepClock, Work
from twinkle.server.runtime.ray.replica import Failure, end_process

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 60.0  # after a failure of one rank, for the others to fail in the same way
_BROKEN_SECONDS = 5.0  # after a rank lost the others, to learn which of them has died
_SLICE_SECONDS = 1.0  # how often a wait looks at the clock


class GroupWatch:
    """Waits for the answers of the ranks of one group, and ends this process if one of them is out of step."""

    def __init__(self, mesh: DeviceMesh, clock: StepClock) -> None:
        """Watch the ranks of ``mesh``; those with the same data rank hold the cuts of one copy of the model."""
        self.copies = [mesh.get_data_rank_from_global_rank(rank) for rank in range(mesh.world_size)]
        self._mesh = mesh
        self._clock = clock
        self._in_call = threading.Event()

    def results(self, work: Work, calls: Sequence[Any], *, by_copy: bool = False) -> list[Any]:
        """Return the results of a call of all ranks, in their order; None for ranks that send none.

        ``by_copy``: the ranks of one copy must answer the same; otherwise all must. If all ranks failed, raise the
        error of one. Called in the compute thread, one call at a time.
        """
        self._in_call.set()
        try:
            started = time.monotonic()
            answers = self._answers(work, dict(enumerate(calls)), self._clock.allowed(work), lambda: True)
            self._compare(work, answers, self.copies if by_copy else [0] * len(calls))
            self._clock.measure(work, time.monotonic() - started)
        finally:
            self._in_call.clear()
        return [answers[rank].result for rank in range(len(calls))]

    def result_of_first(self, work: Work, call: Any) -> Any:
        """Return the result of a call of rank 0 only, or raise its error. Called in any thread.

        The rank answers after the call that it works on, so the time of that call does not count.
        """
        return self._answers(work, {0: call}, self._clock.allowed(work), lambda: not self._in_call.is_set())[0].result

    def _answers(
        self, work: Work, calls: dict[int, Any], allowed: float, counts: Callable[[], bool]
    ) -> dict[int, Answer]:
        """Return the answers by rank. Only seconds count in which this process ran, and for which ``counts()``."""
        answers: dict[int, Answer] = {}
        failures: dict[int, Failure] = {}
        waiting = {call: rank for rank, call in calls.items()}
        waited, warned = 0.0, False
        while waiting:
            started = time.monotonic()
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=_SLICE_SECONDS)
            waited += min(_SLICE_SECONDS, time.monotonic() - started) if counts() else 0.0
            for call in done:
                rank = waiting.pop(call)
                try:
                    answer = ray.get(call)
                except RayError as error:
                    end_process(f"{self._name(rank)} died during {work.kind}: {error}")
                if isinstance(answer, Failure):
                    grace = _BROKEN_SECONDS if isinstance(answer, BrokenGroup) else _GRACE_SECONDS
                    allowed = min(allowed, waited + grace)
                    failures[rank] = answer
                else:
                    answers[rank] = answer
            if waiting and waited > allowed:
                break
            if waiting and waited > allowed / 2 and not warned and not failures:
                warned = True
                logger.warning(
                    "%s: no answer from %s for %.0f s; after %.0f s the group ends and is started again "
                    "(group_timeout_seconds and group_timeout_factor decide)",
                    *(work.kind, self._names(waiting.values()), waited, allowed),
                )
        if not failures and not waiting:
            return answers
        if not failures:
            silent = self._names(waiting.values())
            end_process(
                f"no answer to {work.kind} from {silent} for {waited:.0f} s, so a rank hangs: {allowed:.0f} s are "
                "allowed (group_timeout_seconds and group_timeout_factor decide)"
            )
        # The first that failed; one that lost the others is not the cause.
        rank, failure = min(failures.items(), key=lambda one: isinstance(one[1], BrokenGroup))
        if len(failures) < len(calls) and not isinstance(failure, BrokenGroup):
            others = self._names(rank for rank in calls if rank not in failures)
            end_process(f"{self._name(rank)} failed in {work.kind}, and {others} did not: {failure.error}")
        if any(isinstance(each, BrokenGroup) for each in failures.values()):
            end_process(f"{self._name(rank)} failed in {work.kind}, and the ranks lost each other: {failure.error}")
        raise failure.error

    def _compare(self, work: Work, answers: dict[int, Answer], groups: Sequence[int]) -> None:
        """End this process unless all ranks of a group have answered the same. ``groups``: the group of each rank."""
        first: dict[int, int] = {}  # the first rank of each group
        for rank in sorted(answers):
            other = first.setdefault(groups[rank], rank)
            mine, expected = answers[rank].fingerprint, answers[other].fingerprint
            if mine is None or expected is None or mine.equals(expected):
                continue
            end_process(
                f"{self._name(rank)} answered {work.kind} differently from {self._name(other)}: {mine}; "
                f"{self._name(other)}: {expected}"
            )

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(map(self._name, sorted(ranks)))

    def _name(self, rank: int) -> str:
        return rank_name(self._mesh, rank)


def rank_name(mesh: DeviceMesh, rank: int) -> str:
    """Return the name of a rank for people, such as "rank 3 (pp 1, tp 1)"."""
    places = np.argwhere(mesh.mesh == rank).tolist()
    names = zip(mesh.mesh_dim_names or (), mesh.mesh.shape, *places, strict=False)
    place = [f"{name} {number}" for name, size, number in names if size > 1]
    return f"rank {rank} ({', '.join(place)})" if place else f"rank {rank}"
