"""How many GPUs a configuration asks of a cluster: one that has fewer makes a launch wait, and should say so."""

from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ApplicationSpec, ModelArgs, resources_of
from twinkle.server.runtime.ray.layout import wanted_replicas
from twinkle.server.runtime.ray.sampler_engine import devices_of
from twinkle.server.runtime.ray.trainer_group import mesh_of


def gpus_wanted(config: ServerConfig, has_gpus: bool) -> float:
    """By the replicas of all models, the processes that train for them and those that sample for them."""
    total = 0.0
    for one in config.applications:
        if isinstance(one.args, ModelArgs):
            (served,) = (each for each in config.served_models if each.model is one.args)
            engine = devices_of(config, served)
            ranks = one.args.processes if one.args.processes > 1 and mesh_of(one.args).device_type == "cuda" else 0
            each = gpus_of_replica(one, one.args, has_gpus) + ranks + (0.0 if engine is None else engine.num_gpus)
            total += wanted_replicas(one) * each
    return total


def gpus_of_replica(one: ApplicationSpec, args: ModelArgs, has_gpus: bool) -> float:
    """What is given, else one for a model that is to be on a GPU: it says so, or says nothing and there are some."""
    given = resources_of(one).num_gpus
    if given is not None:
        return given
    if args.backend == "mock" or args.processes > 1:  # the processes of a group have their own
        return 0.0
    wanted = args.compute_device
    return 1.0 if (has_gpus if wanted is None else wanted.startswith("cuda")) else 0.0
