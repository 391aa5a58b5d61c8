"""Where a sampler runs on Ray: in its model's process, or in one of its own."""

from twinkle.server.config.applications import ApplicationSpec, ModelArgs, SamplerArgs
from twinkle.server.config.placement import RayActorOptions

__all__ = ["has_own_process", "resources_of"]


def has_own_process(sampler: ApplicationSpec, model: ModelArgs) -> bool:
    """Whether the engine of this application gets resources of its own.

    It does where the application says which: by a ``device_group`` that is not the model's, or by GPUs for its actor.
    And it must where the model is several processes, none of which could be asked alone. A mock computes nothing.
    """
    args = sampler.args
    assert isinstance(args, SamplerArgs), "a sampler application"
    if model.backend == "mock":
        return False
    trained = None if model.device_group is None else model.device_group.name
    elsewhere = args.device_group is not None and args.device_group.name != trained
    return model.processes > 1 or elsewhere or bool(resources_of(sampler).num_gpus)


def resources_of(application: ApplicationSpec) -> RayActorOptions:
    """What its deployment asks of Ray; nothing is asked for where nothing is said."""
    for given in application.deployments[:1]:
        if given.ray_actor_options is not None:
            return given.ray_actor_options
    return RayActorOptions()
