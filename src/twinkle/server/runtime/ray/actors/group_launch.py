"""Start the processes of a model's device group and load the model into them.

While this takes long, the replica's log says which ranks are up and what the others wait for; ``twinkle-server launch``
shows the last line of that log.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from twinkle.errors import TwinkleServerError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.loading import TrainerFacts, served_model
from twinkle.server.config.applications import ServedModelConfig
from twinkle.server.config.meshes import device_mesh
from twinkle.server.runtime.ray.actors.answers import BrokenGroup
from twinkle.server.runtime.ray.actors.group_watch import GroupWatch, rank_name
from twinkle.server.runtime.ray.actors.step_clock import StepClock
from twinkle.server.runtime.ray.actors.trainer_group import TrainerGroup
from twinkle.server.runtime.ray.actors.trainer_rank import RankProcess, start_ranks
from twinkle.server.runtime.ray.replica import Failure

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0  # for a rank to start or load; then what is waited for is logged
_CAUSE_SECONDS = 5.0  # after a rank lost the others while it loaded, to learn which of them has died


def load_group(served: ServedModelConfig, processes: Sequence[RankProcess]) -> ServedModel:
    """Start the processes of a model's device group and load the model into them. Blocks.

    If a rank cannot start or load, all are ended, and a TwinkleServerError says which rank and why.
    """
    args = served.model
    mesh = device_mesh(args)
    ranks = start_ranks(processes)
    launch = GroupLaunch(args.model_id, mesh)
    try:
        places = launch.wait([rank.meeting_place.remote() for rank in ranks], "start", lambda: _resources(processes[0]))
        devices = ray.get([rank.visible_gpus.remote() for rank in ranks])
        logger.info("all %d ranks of %s are up; their GPUs: %s", len(ranks), args.model_id, devices)
        loading = [rank.load.remote(places[0], args, mesh) for rank in ranks]
        facts: TrainerFacts = launch.wait(loading, "load", lambda: "they read or prepare the model")[0]
    except BaseException:
        for rank in ranks:  # they may wait for each other
            ray.kill(rank)
        raise
    watch = GroupWatch(mesh, StepClock(args.group_timeout_factor, args.group_timeout_seconds))
    return served_model(served, TrainerGroup(ranks, watch, facts.device_bytes), facts)


class GroupLaunch:
    """Waits until all ranks of a group have started or loaded, and logs for which of them it waits."""

    def __init__(self, model_id: str, mesh: DeviceMesh) -> None:
        self._model_id = model_id
        self._mesh = mesh

    def wait(self, calls: Sequence[Any], what: str, reason: Callable[[], str]) -> list[Any]:
        """Return the answers of all ranks. ``what`` they do: start or load. ``reason``: why that may take long.

        There is no time limit: nobody knows how long a model takes to load.
        """
        answers: dict[int, Any] = {}
        waiting = {call: rank for rank, call in enumerate(calls)}
        started = time.monotonic()
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=_PATIENCE_SECONDS)
            for call in done:
                rank = waiting.pop(call)
                answers[rank] = _answer(call)
                if isinstance(answers[rank], Failure):
                    raise self._failure(what, {rank: answers[rank]}, waiting)
            if not done:
                up, others = self._names(answers) or "no rank", self._names(waiting.values())
                logger.warning(
                    "%s: waiting for %s to %s since %.0f s: %s; %s: done",
                    *(self._model_id, others, what, time.monotonic() - started, reason(), up),
                )
        return [answers[rank] for rank in range(len(calls))]

    def _failure(self, what: str, failures: dict[int, Failure], waiting: Mapping[Any, int]) -> TwinkleServerError:
        """Return the error of a rank that could not start or load. A rank that lost the others is not the cause."""
        if all(isinstance(each, BrokenGroup) for each in failures.values()) and waiting:
            for call in ray.wait(list(waiting), num_returns=len(waiting), timeout=_CAUSE_SECONDS)[0]:
                answer = _answer(call)
                if isinstance(answer, Failure):
                    failures[waiting[call]] = answer
        rank, failure = min(failures.items(), key=lambda one: isinstance(one[1], BrokenGroup))
        who = f"{rank_name(self._mesh, rank)} of the {self._mesh.world_size} processes of {self._model_id}"
        logger.error("%s could not %s: %s", who, what, failure.error)
        return TwinkleServerError(f"{who} could not {what}: {_line(failure.error)}")

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(rank_name(self._mesh, rank) for rank in sorted(ranks))


def _answer(call: Any) -> Any:
    """Return the answer of a rank; a :class:`Failure` if it has died."""
    try:
        return ray.get(call)
    except RayError as error:
        return Failure(error)


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
