"""A sampler's own process: a Ray actor with an engine on a copy of the base model.

It only computes, and holds no state that would be missed: sessions, requests and the weights of versions are in the
model's replica, which starts this actor, and another one when it dies.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from twinkle.environment import set_variables, twinkle_variables
from twinkle.model.types import FloatArray
from twinkle.sampler.types import Finished, Progress, SampleRequest, TakesFiles
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import (
    ApplicationSpec,
    ModelArgs,
    SamplerArgs,
    ServedModelConfig,
    has_own_process,
    resources_of,
)
from twinkle.server.config.demand import sampling_device, sampling_process
from twinkle.server.runtime.ray.gpu_reservations import Place
from twinkle.server.runtime.ray.replica import Failure, raised, tried

if TYPE_CHECKING:
    from twinkle.sampler import TorchSampler
    from twinkle.sampler.vllm import VllmSampler

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class AdapterWeights:
    """A version on its way to the engine: the contents of its adapter_config.json, and arrays by PEFT's names.

    If it is not an adapter's but a complete set of weights, ``config`` is empty, and the names are the model's own.
    """

    config: Mapping[str, object]
    arrays: Mapping[str, FloatArray]


@dataclass(frozen=True)
class EngineDevices:
    """The resources that the actor asks of Ray, the kind of device on which its engine computes, and how many GPUs.

    GPUs that are named are reserved already: then ``num_gpus`` is 0, and ``strategy`` binds the actor to their machine.
    """

    device: str
    num_cpus: float
    num_gpus: float
    gpus: int
    resources: Mapping[str, float]
    variables: Mapping[str, str]
    strategy: NodeAffinitySchedulingStrategy | str = "DEFAULT"


class SamplerEngine:
    """The actor that holds a sampling engine. Ray runs its calls one at a time, in the order of submission."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        set_variables(variables)  # before torch looks at them
        self._engine: TorchSampler | VllmSampler

    def load(self, served: ServedModelConfig, devices: EngineDevices) -> str | Failure:
        """Load the engine, and return a sentence for operators on how it divides its memory."""
        from twinkle.server.backends.loading import load_sampling_engine

        def load() -> str:
            self._engine = load_sampling_engine(served, devices.device, devices.gpus)
            return self._engine.memory

        return tried(load)

    def receive_version(self, version_id: str, weights: AdapterWeights) -> Failure | None:
        from twinkle.sampler.received_weights import CopiedTensors, as_tensors

        tensors = as_tensors(weights.arrays) if weights.config else CopiedTensors(weights.arrays)
        return tried(lambda: self._engine.receive_version(version_id, weights.config, tensors))

    def version_saved(self, version_id: str, directory: str) -> Failure | None:
        """Note the files of a version that is a complete set of weights."""

        def note() -> None:
            if isinstance(self._engine, TakesFiles):
                self._engine.version_saved(version_id, directory)

        return tried(note)

    def load_version(self, version_id: str, directory: str) -> Failure | None:
        return tried(lambda: self._engine.load_version(version_id, directory))

    def retire(self, version_id: str) -> Failure | None:
        return tried(lambda: self._engine.retire(version_id))

    def submit(self, request: SampleRequest) -> Failure | None:
        return tried(lambda: self._engine.submit(request))

    def cancel(self, request_id: str) -> Failure | None:
        return tried(lambda: self._engine.cancel(request_id))

    def step(self) -> list[Finished | Progress] | Failure:
        return tried(self._engine.step)


def devices_of(config: ServerConfig, served: ServedModelConfig, place: Place | None = None) -> EngineDevices | None:
    """Return the devices of the sampler's own process; None: it shares the model's process, or there is no sampler.

    ``place``: of the GPUs that are named, which are reserved already.
    """
    ours = [one for one in config.applications if _model_id(one) == served.model.model_id]
    samplers = [one for one in ours if isinstance(one.args, SamplerArgs)]
    (model,) = (one for one in ours if isinstance(one.args, ModelArgs))
    if not samplers or not has_own_process(samplers[0], served.model):
        return None
    asked, needs = resources_of(samplers[0]), sampling_process(samplers[0], model)
    devices = EngineDevices(
        device=sampling_device(samplers[0], model),
        num_cpus=needs.cpus,
        num_gpus=needs.gpus,
        gpus=int(needs.gpus),
        resources=asked.resources or {},
        variables={} if asked.runtime_env is None else asked.runtime_env.env_vars,
    )
    if place is None or not needs.named_gpus or not needs.gpus:
        return devices
    variables = {**devices.variables, **place.variables(needs.named_gpus)}
    return replace(devices, num_gpus=0.0, gpus=len(needs.named_gpus), variables=variables, strategy=place.strategy)


def _model_id(one: ApplicationSpec) -> str | None:
    return one.args.model_id if isinstance(one.args, ModelArgs | SamplerArgs) else None


@dataclass(frozen=True)
class StartingEngine:
    """An actor that is starting and loading its engine."""

    actor: Any
    loading: Any  # an ObjectRef
    devices: EngineDevices

    def ready(self) -> tuple[Any, str]:
        """Return the actor and a sentence on its memory, once the engine is loaded. Blocks; a long wait is logged."""
        while not ray.wait([self.loading], timeout=_PATIENCE_SECONDS)[0]:
            logger.warning("the sampler's process is not ready: it loads, or the cluster has no %s", self.devices)
        memory: str = raised(ray.get(self.loading))
        return self.actor, memory


def start_engine(served: ServedModelConfig, devices: EngineDevices) -> StartingEngine:
    actor = (
        ray.remote(SamplerEngine)
        .options(
            num_cpus=devices.num_cpus,
            num_gpus=devices.num_gpus,
            resources=dict(devices.resources),
            scheduling_strategy=devices.strategy,
        )
        .remote({**twinkle_variables(), **devices.variables})
    )
    return StartingEngine(actor, actor.load.remote(served, devices), devices)
