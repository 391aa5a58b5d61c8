"""Start the processes of a model's device group and load the model into them.

While this takes long, the replica's log says which ranks are up and what the others wait for or do; ``twinkle-server
launch`` shows the last line of that log.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from twinkle.errors import TwinkleServerError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.loading import TrainerFacts, served_model
from twinkle.server.config.applications import ServedModelConfig
from twinkle.server.config.meshes import device_mesh
from twinkle.server.runtime.ray.actors.answers import BrokenGroup
from twinkle.server.runtime.ray.actors.group_watch import GroupWatch, rank_name
from twinkle.server.runtime.ray.actors.load_watch import HungRank, LoadBoard, LoadReport, LoadReporter, LoadWatch
from twinkle.server.runtime.ray.actors.step_clock import StepClock
from twinkle.server.runtime.ray.actors.trainer_group import TrainerGroup
from twinkle.server.runtime.ray.actors.trainer_rank import RankPlace, RankProcess, start_ranks
from twinkle.server.runtime.ray.replica import Failure

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0  # for a rank to start or load; then what is waited for is logged
_BOARD_SECONDS = 300.0  # for the process to which ranks report to start and answer
_LOOK_SECONDS = 5.0  # between two looks at what ranks report while they load
_SHOWN_RANKS = 4  # of those that load, in a line about what they do
_CAUSE_SECONDS = 5.0  # after a rank lost the others while it loaded, to learn which of them has died


def load_group(served: ServedModelConfig, processes: Sequence[RankProcess]) -> ServedModel:
    """Start the processes of a model's device group and load the model into them. Blocks.

    If a rank cannot start or load, all are ended, and a TwinkleServerError says which rank and why.
    """
    args = served.model
    mesh = device_mesh(args)
    board = ray.remote(LoadBoard).options(num_cpus=0, scheduling_strategy=_this_machine()).remote()
    ranks = start_ranks(processes)
    reporters = [LoadReporter(board, number) for number in range(len(ranks))]
    launch = GroupLaunch(args.model_id, mesh, args.group_load_timeout_seconds)
    try:
        launch.start([rank.place.remote() for rank in ranks], lambda: _resources(processes[0]))
        together = list(zip(ranks, reporters, strict=True))
        # A download may take hours, and only the hub knows whether it still gets further.
        finding = [rank.find_files.remote(reporter, args.model_id) for rank, reporter in together]
        launch.load(finding, "find the model's files", board, progress_counts=False)
        loading = [rank.load.remote(reporter, launch.meeting_place, args, mesh) for rank, reporter in together]
        facts: TrainerFacts = launch.load(loading, "load", board, progress_counts=True)[0]
    except BaseException:
        for rank in ranks:  # they may wait for each other
            ray.kill(rank)
        raise
    finally:
        ray.kill(board)
    watch = GroupWatch(mesh, StepClock(args.group_timeout_factor, args.group_timeout_seconds))
    return served_model(served, TrainerGroup(ranks, watch, facts.device_bytes), facts)


def _this_machine() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)


class GroupLaunch:
    """Waits until all ranks of a group have started or loaded, and logs for which of them it waits."""

    def __init__(self, model_id: str, mesh: DeviceMesh, limit: float) -> None:
        """``limit``: seconds after which a rank that loads, and reports nothing or nothing new, counts as hung."""
        self._model_id = model_id
        self._mesh = mesh
        self._limit = limit
        self._places: list[RankPlace] = []

    @property
    def meeting_place(self) -> tuple[str, int]:
        """Return the address and port at which the ranks find each other: those of the first."""
        return self._places[0].address, self._places[0].port

    def start(self, calls: Sequence[Any], reason: Callable[[], str]) -> None:
        """Wait until all ranks have started. ``reason``: why that may take long.

        There is no time limit: the cluster may have to grow first.
        """
        self._places = self._wait(calls, "start", reason, lambda _waiting, _seconds: None)
        gpus = [place.gpus for place in self._places]
        logger.info("all %d ranks of %s are up; their GPUs: %s", len(calls), self._model_id, gpus)

    def load(self, calls: Sequence[Any], what: str, board: Any, *, progress_counts: bool) -> list[Any]:
        """Return the answers of all ranks to ``what``, a part of loading, in which they report to a board.

        ``progress_counts``: whether a rank that reports, but gets no further, counts as hung.
        """
        watch = LoadWatch(self._limit, progress_counts=progress_counts)

        def look(waiting: Mapping[Any, int], seconds: float) -> None:
            hung = watch.look(_reports(board), waiting.values(), seconds)
            if hung is not None:
                raise self._hung(what, hung, watch, waiting)

        def reason() -> str:
            slowest = watch.slowest(_SHOWN_RANKS)
            return "; ".join(f"{self._on_host(rank)}: {watch.reports.get(rank, 'no report')}" for rank in slowest)

        return self._wait(calls, what, reason, look)

    def _wait(
        self,
        calls: Sequence[Any],
        what: str,
        reason: Callable[[], str],
        look: Callable[[Mapping[Any, int], float], None],
    ) -> list[Any]:
        """Return the answers of all ranks. ``what`` they do. ``reason``: what they wait for or do now.

        ``look`` is called with the calls that are not answered, and the seconds since it was called before.
        """
        answers: dict[int, Any] = {}
        waiting = {call: rank for rank, call in enumerate(calls)}
        started = quiet_since = time.monotonic()
        while waiting:
            before = time.monotonic()
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=_LOOK_SECONDS)
            now = time.monotonic()
            for call in done:
                rank = waiting.pop(call)
                answers[rank], quiet_since = _answer(call), now
                if isinstance(answers[rank], Failure):
                    raise self._failure(what, {rank: answers[rank]}, waiting)
            look(waiting, min(now - before, _LOOK_SECONDS))  # the time in which this process was stopped does not count
            if waiting and now - quiet_since >= _PATIENCE_SECONDS:
                quiet_since = now
                ready, others = self._names(answers) or "none", self._names(waiting.values())
                logger.warning(
                    "%s: waiting since %.0f s for ranks to %s: %s; ready: %s; %s",
                    *(self._model_id, now - started, what, others, ready, reason()),
                )
        return [answers[rank] for rank in range(len(calls))]

    def _hung(self, what: str, hung: HungRank, watch: LoadWatch, waiting: Mapping[Any, int]) -> TwinkleServerError:
        """Return the error of a rank that hangs, and log what all ranks do that load."""
        for rank in sorted(waiting.values()):
            logger.error("%s, while a rank hangs: %s", self._on_host(rank), watch.reports.get(rank, "no report"))
        who = f"{self._on_host(hung.rank)} of the {self._mesh.world_size} processes of {self._model_id}"
        message = f"{who} hangs and could not {what}: {hung.why} (group_load_timeout_seconds: {self._limit:g})"
        logger.error("%s", message)
        return TwinkleServerError(message)

    def _failure(self, what: str, failures: dict[int, Failure], waiting: Mapping[Any, int]) -> TwinkleServerError:
        """Return the error of a rank that could not start or load. A rank that lost the others is not the cause."""
        if all(isinstance(each, BrokenGroup) for each in failures.values()) and waiting:
            for call in ray.wait(list(waiting), num_returns=len(waiting), timeout=_CAUSE_SECONDS)[0]:
                answer = _answer(call)
                if isinstance(answer, Failure):
                    failures[waiting[call]] = answer
        rank, failure = min(failures.items(), key=lambda one: isinstance(one[1], BrokenGroup))
        name = self._on_host(rank) if self._places else rank_name(self._mesh, rank)
        who = f"{name} of the {self._mesh.world_size} processes of {self._model_id}"
        logger.error("%s could not %s: %s", who, what, failure.error)
        return TwinkleServerError(f"{who} could not {what}: {_line(failure.error)}")

    def _on_host(self, rank: int) -> str:
        return f"{rank_name(self._mesh, rank)} on {self._places[rank].address}"

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(rank_name(self._mesh, rank) for rank in sorted(ranks))


def _answer(call: Any) -> Any:
    """Return the answer of a rank; a :class:`Failure` if it has died."""
    try:
        return ray.get(call)
    except RayError as error:
        return Failure(error)


def _reports(board: Any) -> Mapping[int, LoadReport]:
    """Return what the ranks have reported to the board of their group."""
    try:
        reports: Mapping[int, LoadReport] = ray.get(board.reports.remote(), timeout=_BOARD_SECONDS)
    except RayError as error:
        raise TwinkleServerError(
            f"the process to which ranks report while they load does not answer: {error}"
        ) from error
    return reports


def _line(error: Exception) -> str:
    """Return an error in one line, without a traceback: launch shows only one line of what Serve says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Traceback"):
        return lines[-1]
    return f"{type(error).__name__}: {' '.join(lines)}"


def _resources(one: RankProcess) -> str:
    free = ray.available_resources()
    return (
        f"each needs {one.cpus:g} CPUs and {one.gpus:g} GPUs, and {free.get('CPU', 0.0):g} CPUs and "
        f"{free.get('GPU', 0.0):g} GPUs of the cluster are free"
    )
