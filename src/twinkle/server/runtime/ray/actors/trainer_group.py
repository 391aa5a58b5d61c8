"""A trainer of several processes: one Ray actor for each rank.

The training service calls it from its compute thread, like a trainer in its own process. The rows of a batch are
divided among ranks by tokens. Other calls that change something, or read weights, go to all ranks in the same order,
and the answer of the first stands for all. A rank that dies or fails alone leaves the others in the middle of a call:
then this process ends too, Serve replaces it, and journal and snapshots bring back all acknowledged ops.
"""

import functools
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from twinkle.environment import listed_devices, set_variables, twinkle_variables
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.platform import GPU
from twinkle.model.types import (
    EMPTY,
    AdapterSnapshot,
    TrainerNumbers,
    TrainFailure,
    TrainingSpec,
    TrainItem,
    TrainResult,
)
from twinkle.server.backends.backend import ServedModel, TrainingBackend
from twinkle.server.backends.loading import TrainerFacts, budget_of, load_full_trainer, load_trainer, served_model
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ApplicationSpec, ModelArgs, ServedModelConfig, resources_of
from twinkle.server.config.demand import rank_process
from twinkle.server.config.meshes import device_mesh
from twinkle.server.runtime.ray.gpu_reservations import Place
from twinkle.server.runtime.ray.replica import Failure, end_process, tried
from twinkle.utils.network import find_free_port

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0  # for processes to start; then the reason for waiting is logged
_GRACE_SECONDS = 60.0  # after a failure of one rank, for the others to fail too


class _Rank:
    """The actor that holds the trainer of one rank."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        set_variables(variables)  # before torch looks at them
        self._trainer: Any = None

    def meeting_place(self) -> tuple[str, int]:
        address = ray.util.get_node_ip_address()
        return address, find_free_port(address)

    def visible_gpus(self) -> tuple[str, ...] | None:
        """Return the ids of the GPUs that this process may use; None: those of the machine."""
        return listed_devices(GPU.visible_variable)

    def load(self, master: tuple[str, int], args: ModelArgs, mesh: DeviceMesh) -> TrainerFacts:
        set_variables({"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])})
        load = load_full_trainer if args.train_mode == "full" else load_trainer
        self._trainer = load(args, mesh.device_type, budget_of(args), compiled=args.compiled, mesh=mesh)
        return TrainerFacts.from_trainer(self._trainer)

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Call a method of the trainer and return its result, or a :class:`Failure`."""
        try:
            return tried(lambda: getattr(self._trainer, method)(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - an edge: the group decides what a failure means
            return Failure(RuntimeError("".join(traceback.format_exception(error))))

    def passes(self, method: str, items: Sequence[TrainItem]) -> object:
        """Run passes; return their results and objectives, which they may have changed, or a :class:`Failure`."""
        results = self.call(method, (items,), {})
        return results if isinstance(results, Failure) else (results, [item.objective for item in items])


def _on_all(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate["TrainerGroup", P], T]:
    """Return a method of the group that calls the trainer's method of the same name on all ranks."""

    def call(self: "TrainerGroup", /, *arguments: P.args, **options: P.kwargs) -> T:
        answer: T = self._all(method.__name__, *arguments, **options)
        return answer

    return call


class TrainerGroup(TrainingBackend):
    """A trainer of several ranks, which work on every batch together. Each rank manages its own memory.

    Ranks with the same data rank hold the cuts of one copy of the model, and get the same rows.
    """

    def __init__(self, ranks: Sequence[Any], mesh: DeviceMesh) -> None:
        self._ranks = tuple(ranks)
        self._data_ranks = [mesh.get_data_rank_from_global_rank(number) for number in range(len(ranks))]
        self._rows = 0
        self._adapters: dict[str, None] = {}  # kept here, because any thread may ask while the ranks are busy

    def check_adapter(self, spec: TrainingSpec) -> None:
        """Check a spec on the first rank only. This changes nothing, so the other ranks may be in a call meanwhile."""
        _answers([self._ranks[0].call.remote("check_adapter", (spec,), {})])

    def create_adapter(self, adapter_id: str, spec: TrainingSpec) -> TrainingSpec:
        made: TrainingSpec = self._all("create_adapter", adapter_id, spec)
        self._adapters[adapter_id] = None
        return made

    def remove_adapter(self, adapter_id: str) -> None:
        self._all("remove_adapter", adapter_id)
        self._adapters.pop(adapter_id, None)

    def adapter_ids(self) -> list[str]:
        return list(self._adapters)

    def host_bytes(self) -> int:
        """Return 0: no adapter is in this process."""
        return 0

    def host_bytes_of(self, spec: TrainingSpec) -> int:
        return 0

    def numbers(self) -> TrainerNumbers:
        """Return the numbers that this process knows without asking the ranks; the others are 0."""
        return TrainerNumbers(len(self._adapters), 0, self._rows, 0)

    def forward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        return self._passes("forward", items)

    def forward_backward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        return self._passes("forward_backward", items)

    optim_step = _on_all(TrainingBackend.optim_step)
    optimizer_step = _on_all(TrainingBackend.optimizer_step)
    zero_grad = _on_all(TrainingBackend.zero_grad)
    snapshot = _on_all(TrainingBackend.snapshot)
    load = _on_all(TrainingBackend.load)
    scale_gradient = _on_all(TrainingBackend.scale_gradient)
    gradient_norm = _on_all(TrainingBackend.gradient_norm)
    vocabulary_size = _on_all(TrainingBackend.vocabulary_size)
    weights = _on_all(TrainingBackend.weights)
    shapes = _on_all(TrainingBackend.shapes)
    peft_config = _on_all(TrainingBackend.peft_config)

    def restore(self, adapter_id: str, snapshot: AdapterSnapshot) -> None:
        self._all("restore", adapter_id, snapshot)
        self._adapters[adapter_id] = None

    def prepare_save(
        self,
        adapter_id: str,
        optimizer: bool = True,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
    ) -> Callable[[Path], None]:
        """Copy the adapter's state to this process, and return a function that writes it from here."""
        write: functools.partial[None] = self._all("prepare_save", adapter_id, optimizer, dict(state))
        return functools.partial(write, companions=companions)

    def _all(self, method: str, *args: object, **kwargs: object) -> Any:
        return _answers([rank.call.remote(method, args, kwargs) for rank in self._ranks])[0]

    def _passes(self, method: str, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        from twinkle.model.multi_lora.library_objective import LibraryObjective, TopkObjective
        from twinkle.model.trainer.shard_requests import RequestShards  # here, because it imports torch

        count = max(self._data_ranks) + 1
        shards = RequestShards.by_tokens(items, count)
        shares = [shards.share(number) for number in range(count)]
        placed = zip(self._ranks, self._data_ranks, strict=True)
        all_answers = _answers([rank.passes.remote(method, shares[data_rank]) for rank, data_rank in placed])
        answers = [all_answers[self._data_ranks.index(number)] for number in range(count)]
        for index, item in enumerate(items):
            if isinstance(
                item.objective, LibraryObjective | TopkObjective
            ):  # all its rows are on one rank, which counted tokens
                owner = (shards.owners[index] or (0,))[0]
                item.objective.num_tokens = answers[owner][1][index].num_tokens
        joined = shards.join([results for results, _ in answers])
        done = [result for result in joined if isinstance(result, TrainResult)]
        self._rows += sum(len(logprobs) for result in done for logprobs in result.logprobs)
        return joined


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
        ray.remote(_Rank)
        .options(num_cpus=one.cpus, num_gpus=one.gpus, scheduling_strategy=one.strategy)
        .remote({**twinkle_variables(), **one.variables, **_rank_variables(number, len(processes))})
        for number, one in enumerate(processes)
    ]


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


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that torchrun would set. Each process sees only its own device, so its local rank is 0."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _answers(calls: Sequence[Any]) -> list[Any]:
    """Return the answers of the ranks to ``calls``, one for each rank that is asked.

    If all failed, raise the error of one. If a rank died or only some failed, the ranks are no longer in the same
    state: then this process ends.
    """
    answers: dict[Any, Any] = {}
    failed = False
    while len(answers) < len(calls):
        waiting = [call for call in calls if call not in answers]
        done, _ = ray.wait(waiting, num_returns=1, timeout=_GRACE_SECONDS if failed else None)
        if not done:
            end_process("a process of the model's group failed and the others hang")
        try:
            answers[done[0]] = ray.get(done[0])
        except RayError as error:
            end_process(f"a process of the model's group died: {error}")
        failed = failed or isinstance(answers[done[0]], Failure)
    failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
    if failures and len(failures) < len(calls):
        end_process(f"one process of the model's group failed and another did not: {failures[0].error}")
    if failures:
        raise failures[0].error
    return [answers[call] for call in calls]
