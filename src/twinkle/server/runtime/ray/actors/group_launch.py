"""Start the processes of a model's device group and load the model into them."""

import logging
from collections.abc import Sequence

import ray

from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.loading import TrainerFacts, served_model
from twinkle.server.config.applications import ServedModelConfig
from twinkle.server.config.meshes import device_mesh
from twinkle.server.runtime.ray.actors.trainer_group import TrainerGroup
from twinkle.server.runtime.ray.actors.trainer_rank import RankProcess, start_ranks

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0  # for processes to start; then the reason for waiting is logged


def load_group(served: ServedModelConfig, processes: Sequence[RankProcess]) -> ServedModel:
    """Start the processes of a model's device group and load the model into them. Blocks."""
    args = served.model
    mesh = device_mesh(args)
    ranks = start_ranks(processes)
    places = [rank.meeting_place.remote() for rank in ranks]
    while waiting := ray.wait(places, num_returns=len(places), timeout=_PATIENCE_SECONDS)[1]:
        one, free = processes[0], ray.available_resources()
        logger.warning(
            "%d of %d processes of %s have not started: each needs %g CPUs and %g GPUs, and %g CPUs and %g GPUs of the "
            "cluster are free",
            *(len(waiting), len(ranks), args.model_id, one.cpus, one.gpus, free.get("CPU", 0.0), free.get("GPU", 0.0)),
        )
    logger.info("GPUs of the processes of %s: %s", args.model_id, ray.get([one.visible_gpus.remote() for one in ranks]))
    master = ray.get(places[0])
    facts: TrainerFacts = ray.get([rank.load.remote(master, args, mesh) for rank in ranks])[0]
    return served_model(served, TrainerGroup(ranks, mesh), facts)
