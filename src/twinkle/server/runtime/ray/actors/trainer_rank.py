"""The processes of a trainer's group: the Ray actor that holds the trainer of one rank, and how it is started."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from twinkle.environment import listed_devices, set_variables, twinkle_variables
from twinkle.errors import RankFailedError, TwinkleError
from twinkle.hub import resolve
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.platform import GPU
from twinkle.model.types import TrainItem
from twinkle.server.backends.loading import TrainerFacts, budget_of, load_full_trainer, load_trainer
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ApplicationSpec, ModelArgs, ServedModelConfig, resources_of
from twinkle.server.config.demand import rank_process
from twinkle.server.runtime.ray.actors.answers import Answer, BrokenGroup, fingerprint
from twinkle.server.runtime.ray.actors.load_watch import LoadReporter
from twinkle.server.runtime.ray.gpu_reservations import Place
from twinkle.server.runtime.ray.replica import Failure
from twinkle.utils.network import find_free_port

T = TypeVar("T")


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs: the address of its machine, a free port there, and the ids of the GPUs that it may use.

    ``gpus`` None: all GPUs of the machine.
    """

    address: str
    port: int
    gpus: tuple[str, ...] | None


class TrainerRank:
    """The actor that holds the trainer of one rank."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        set_variables(variables)  # before torch looks at them
        self._trainer: Any = None

    def place(self) -> RankPlace:
        address = ray.util.get_node_ip_address()
        return RankPlace(address, find_free_port(address), listed_devices(GPU.visible_variable))

    def find_files(self, reporter: LoadReporter, model_id: str) -> Failure | None:
        """Find the files of the model on this machine, or download them."""
        with reporter.reporting():
            found = _tried(lambda: resolve(model_id))
        return found if isinstance(found, Failure) else None

    def load(
        self, reporter: LoadReporter, master: tuple[str, int], args: ModelArgs, mesh: DeviceMesh
    ) -> TrainerFacts | Failure:
        """Join the other ranks, which load too, and load the model."""
        set_variables({"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])})
        load = load_full_trainer if args.train_mode == "full" else load_trainer

        def loaded() -> TrainerFacts:
            self._trainer = load(args, mesh.device_type, budget_of(args), compiled=args.compiled, mesh=mesh)
            return TrainerFacts.from_trainer(self._trainer)

        with reporter.reporting():
            return _tried(loaded)

    def call(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, sends: bool, compares: bool
    ) -> Answer | Failure:
        """Call a method of the trainer.

        ``sends``: the group uses the result of this rank. ``compares``: it compares fingerprints of the results.
        """
        result = _tried(lambda: getattr(self._trainer, method)(*args, **kwargs))
        if isinstance(result, Failure):
            return result
        return Answer(result if sends else None, fingerprint(result) if compares else None)

    def passes(self, method: str, items: Sequence[TrainItem], *, sends: bool) -> Answer | Failure:
        """Run passes. The result of the answer is their results and objectives, which they may have changed."""
        results = _tried(lambda: getattr(self._trainer, method)(items))
        if isinstance(results, Failure):
            return results
        return Answer((results, [item.objective for item in items]) if sends else None, fingerprint(results))


def _tried(work: Callable[[], T]) -> T | Failure:
    """Return the result of the work, or a :class:`Failure`: the group decides what a failure of one rank means."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - an edge of this process
        failed = BrokenGroup if _lost_others(error) else Failure
        expected = isinstance(error, TwinkleError)
        return failed(error if expected else RuntimeError("".join(traceback.format_exception(error))))


def _lost_others(error: Exception) -> bool:
    """Return whether this rank cannot work with the others any more after an error, such as one of communication.

    torch's DistError is found by its name, because the server does not import torch. gloo raises plain RuntimeErrors,
    which name its files.
    """
    if isinstance(error, RankFailedError) or "DistError" in [each.__name__ for each in type(error).__mro__]:
        return True
    return type(error) is RuntimeError and "gloo" in str(error)


@dataclass(frozen=True)
class RankProcess:
    """What a process of a group asks of Ray, and its variables. ``strategy``: of its machine, if it names its GPU."""

    cpus: float
    gpus: float
    variables: Mapping[str, str]
    strategy: NodeAffinitySchedulingStrategy | str = "DEFAULT"


def ranks_of(config: ServerConfig, served: ServedModelConfig, place: Place | None) -> list[RankProcess]:
    """Return the processes of a model's group. ``place``: of the GPUs that are named, which are reserved already."""
    (one,) = (each for each in config.applications if _trains(each, served.model.model_id))
    needs, environment = rank_process(one, served.model), resources_of(one).runtime_env
    variables = {} if environment is None else environment.env_vars
    if place is None or not needs.named_gpus or not needs.gpus:
        return [RankProcess(needs.cpus, needs.gpus, variables)] * served.model.processes
    return [
        RankProcess(needs.cpus, 0.0, {**variables, **place.variables([gpu])}, place.strategy)
        for gpu in needs.named_gpus
    ]


def _trains(one: ApplicationSpec, model_id: str) -> bool:
    return isinstance(one.args, ModelArgs) and one.args.model_id == model_id


def start_ranks(processes: Sequence[RankProcess]) -> list[Any]:
    """Start an actor for each process of a group, in the order of their ranks."""
    return [
        ray.remote(TrainerRank)
        .options(num_cpus=one.cpus, num_gpus=one.gpus, scheduling_strategy=one.strategy)
        .remote({**twinkle_variables(), **one.variables, **_rank_variables(number, len(processes))})
        for number, one in enumerate(processes)
    ]


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that torchrun would set. Each process sees only its own device, so its local rank is 0."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
