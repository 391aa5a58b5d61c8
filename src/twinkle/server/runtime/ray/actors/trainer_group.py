"""A trainer of several processes: one Ray actor for each rank.

The training service calls it from its compute thread, like a trainer in its own process. The rows of a batch are
divided among data ranks by tokens. Other calls that change something, or read weights, go to all ranks in the same
order, and the answer of the first stands for all. A rank that dies or fails alone leaves the others in the middle of a
call: then this process ends too, Serve replaces it, and journal and snapshots bring back all acknowledged ops.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.types import (
    EMPTY,
    AdapterSnapshot,
    TrainerNumbers,
    TrainFailure,
    TrainingSpec,
    TrainItem,
    TrainResult,
)
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.runtime.ray.actors.group_watch import answers_of

P = ParamSpec("P")
T = TypeVar("T")


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
        answers_of([self._ranks[0].call.remote("check_adapter", (spec,), {})])

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
        return answers_of([rank.call.remote(method, args, kwargs) for rank in self._ranks])[0]

    def _passes(self, method: str, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        from twinkle.model.multi_lora.library_objective import LibraryObjective, TopkObjective
        from twinkle.model.trainer.shard_requests import RequestShards  # here, because it imports torch

        count = max(self._data_ranks) + 1
        shards = RequestShards.by_tokens(items, count)
        shares = [shards.share(number) for number in range(count)]
        placed = zip(self._ranks, self._data_ranks, strict=True)
        all_answers = answers_of([rank.passes.remote(method, shares[data_rank]) for rank, data_rank in placed])
        answers = [all_answers[self._data_ranks.index(number)] for number in range(count)]
        for index, item in enumerate(items):
            if isinstance(
                item.objective, LibraryObjective | TopkObjective
            ):  # all its rows are on one data rank, which counted tokens
                owner = (shards.owners[index] or (0,))[0]
                item.objective.num_tokens = answers[owner][1][index].num_tokens
        joined = shards.join([results for results, _ in answers])
        done = [result for result in joined if isinstance(result, TrainResult)]
        self._rows += sum(len(logprobs) for result in done for logprobs in result.logprobs)
        return joined
