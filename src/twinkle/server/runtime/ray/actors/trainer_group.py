"""A trainer of several processes: one Ray actor for each rank.

The training service calls it from its compute thread, like a trainer in its own process. The rows of a batch are
divided among data ranks by tokens. Other calls that change something, or read weights, go to all ranks in the same
order, and the answer of the first stands for all. A rank that dies or fails alone leaves the others in the middle of a
call: then this process ends too, Serve replaces it, and journal and snapshots bring back all acknowledged ops.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from twinkle.model.types import (
    EMPTY,
    AdapterSnapshot,
    LoraSpec,
    TrainerNumbers,
    TrainFailure,
    TrainingSpec,
    TrainItem,
    TrainResult,
)
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.runtime.ray.actors.group_watch import GroupWatch
from twinkle.server.runtime.ray.actors.step_clock import Work

P = ParamSpec("P")
T = TypeVar("T")

# Calls whose results all ranks compute by themselves. Those of other calls are copies of the state, and large.
_COMPARED = frozenset({"create_adapter", "optim_step", "optimizer_step", "gradient_norm"})
# Calls that take as long for one adapter as for another. Others read or write a whole adapter.
_STEPS = frozenset({"optim_step", "optimizer_step"})


_MOST_PRICES = 4096  # adapters of different shapes whose price is known at a time


def _shape(spec: TrainingSpec) -> str:
    """Return a spec as text, without the options that do not change how large an adapter is."""
    if isinstance(spec, LoraSpec):
        spec = replace(spec, seed=None, alpha=1.0, alpha_pattern={}, use_rslora=False, dropout=0.0, init_weights=True)
    return repr(spec)


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

    def __init__(self, ranks: Sequence[Any], watch: GroupWatch, device_bytes: int = 0) -> None:
        """``device_bytes``: the memory of each rank's device for adapters; 0 if that is host memory."""
        self._ranks = tuple(ranks)
        self._watch = watch
        self._device_bytes = device_bytes
        self._rows = 0
        # Both are kept here, because any thread may ask while the ranks are busy.
        self._adapters: dict[str, int] = {}  # the most bytes of host memory that each takes in one rank
        self._prices: dict[str, int] = {}  # the same by spec

    def check_adapter(self, spec: TrainingSpec) -> None:
        """Check a spec on the first rank only. This changes nothing, so the other ranks may be in a call meanwhile."""
        self._ask_first("check_adapter", spec)
        self._price(spec)

    def create_adapter(self, adapter_id: str, spec: TrainingSpec) -> TrainingSpec:
        made: TrainingSpec = self._all("create_adapter", adapter_id, spec)
        self._adapters[adapter_id] = self._price(made)
        return made

    def remove_adapter(self, adapter_id: str) -> None:
        self._all("remove_adapter", adapter_id)
        self._adapters.pop(adapter_id, None)

    def adapter_ids(self) -> list[str]:
        return list(self._adapters)

    def host_bytes(self) -> int:
        """Return the bytes of host memory that adapters take in all ranks: what does not fit onto their devices."""
        in_one = sum(self._adapters.copy().values())
        return max(0, in_one - self._device_bytes) * len(self._ranks)

    def host_bytes_of(self, spec: TrainingSpec) -> int:
        """Return the most bytes that an adapter takes in all ranks, each of which has its cut of it.

        For a shape that was not asked for before, this waits until the first rank has ended its present call.
        """
        return self._price(spec) * len(self._ranks)

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
        """Restore all ranks from one copy of the snapshot in Ray's object store; of all parameters it is large."""
        self._call_all(Work(f"restore of {adapter_id}"), "restore", ray.put((adapter_id, snapshot)), {})
        self._adapters[adapter_id] = self._price(snapshot.spec)

    def prepare_save(
        self,
        adapter_id: str,
        optimizer: bool = True,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
        synced: bool = True,
    ) -> Callable[[Path], None]:
        """Copy the adapter's state to this process, and return a function that writes it from here."""
        write: functools.partial[None] = self._all("prepare_save", adapter_id, optimizer, dict(state))
        return functools.partial(write, companions=companions, synced=synced)

    def _price(self, spec: TrainingSpec) -> int:
        """Return the bytes of host memory that an adapter of this shape takes in a rank. The first rank is asked once.

        All ranks have the same price: that of the largest cut.
        """
        shape = _shape(spec)
        if shape not in self._prices:
            if len(self._prices) >= _MOST_PRICES:
                self._prices.clear()
            self._prices[shape] = self._ask_first("host_bytes_of", spec)
        return self._prices[shape]

    def _ask_first(self, method: str, spec: TrainingSpec) -> Any:
        call = self._ranks[0].call.remote(method, (spec,), {}, sends=True, compares=False)
        return self._watch.result_of_first(Work(method), call)

    def _all(self, method: str, *args: object, **kwargs: object) -> Any:
        """Call a method on all ranks, and return the result of the first, which is the only one that is sent."""
        work = Work(method if method in _STEPS or not args else f"{method} of {args[0]}")
        return self._call_all(work, method, args, kwargs)

    def _call_all(self, work: Work, method: str, args: Any, kwargs: Mapping[str, object]) -> Any:
        """Call a method on all ranks. ``args``: its arguments as a tuple, or that tuple in Ray's object store."""
        calls = [
            rank.call.remote(method, args, kwargs, sends=number == 0, compares=method in _COMPARED)
            for number, rank in enumerate(self._ranks)
        ]
        return self._watch.results(work, calls)[0]

    def _passes(self, method: str, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        """Run passes. The results of each copy of the model are sent by the first of its ranks."""
        from twinkle.model.multi_lora.library_objective import LibraryObjective, TopkObjective
        from twinkle.model.trainer.shard_requests import RequestShards  # here, because it imports torch

        copies = self._watch.copies
        count = max(copies) + 1
        senders = [copies.index(number) for number in range(count)]
        shards = RequestShards.by_tokens(items, count)
        shares = [shards.share(number) for number in range(count)]
        calls = [
            rank.passes.remote(method, shares[copy], sends=number in senders)
            for number, (rank, copy) in enumerate(zip(self._ranks, copies, strict=True))
        ]
        results = self._watch.results(Work(method, *shards.work()), calls, by_copy=True)
        answers = [results[sender] for sender in senders]
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
