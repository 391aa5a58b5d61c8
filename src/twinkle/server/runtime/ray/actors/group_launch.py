"""Start the processes of a model's device group and load the model into them."""

import logging
from collections.abc import Sequence

import numpy as np
import ray

from twinkle.infra.device_mesh import DeviceMesh
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.loading import TrainerFacts, served_model
from twinkle.server.config.applications import ModelArgs, ServedModelConfig
from twinkle.server.runtime.ray.actors.trainer_group import TrainerGroup
from twinkle.server.runtime.ray.actors.trainer_rank import RankProcess, start_ranks

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0  # for processes to start; then the reason for waiting is logged


def load_group(served: ServedModelConfig, processes: Sequence[RankProcess]) -> ServedModel:
    """Start the processes of a model's device group and load the model into them. Blocks."""
    args = served.model
    mesh = mesh_of(args)
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
    return served_model(served, TrainerGroup(ranks), facts, mesh.world_size)


def mesh_of(args: ModelArgs) -> DeviceMesh:
    """Return the configured mesh; without one, a data-parallel mesh of all processes of the group."""
    given, device = args.device_mesh, args.group_device
    if given is None:
        return DeviceMesh.from_sizes(dp_size=args.processes, device_type=device)
    if given.mesh is not None:
        return DeviceMesh(np.array(given.mesh), given.mesh_dim_names, device_type=device)
    return DeviceMesh.from_sizes(
        world_size=given.world_size or 1, dp_size=given.dp_size, fsdp_size=given.fsdp_size, device_type=device
    )
