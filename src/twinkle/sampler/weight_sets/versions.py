"""Versions that are complete sets of weights. They take turns on one model.

A set takes as much memory as the model, so there are few places for sets, and all memory is taken at the start. A
version whose files are known gives up its place when another one needs it, the least recently used first, and is read
from its files when its next turn comes. The model computes with one set at a time. All sets share the cache of keys and
values, which keeps the tokens of each version apart: so a version that is alone has the whole cache, and nothing is
computed again when the sets change. A turn goes to the scope (on a server: the tenant) that was served longest ago,
and there to the version that was served longest ago.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from torch import Tensor

from twinkle.errors import CapacityError, CheckpointError, InvalidInputError, TwinkleError
from twinkle.model.decoder.base_weights import named_weights
from twinkle.model.full.checkpoint import read_full
from twinkle.model.full.weights import read_layout
from twinkle.model.trainer.trainer import Trainer
from twinkle.sampler.torch_sampler.jobs import Job
from twinkle.sampler.torch_sampler.versions import Forget, Turn, require_new, unknown_version
from twinkle.sampler.weight_sets.slots import WeightSlots

WeightSource = Callable[[str], Mapping[str, Tensor]]  # an adapter's id → its present weights, by checkpoint names

_ADAPTER = "adapter_config.json"
_DEFAULT_SETS = 2  # what is sampled from now, and its successor
_SHARE = 0.6  # sets take at most this share of the memory beside weights and activations; the cache needs the rest
_RAISE_BUDGET = "raise memory_budget_gib of the model, or give the sampler devices of its own (device_group)"
_STAY = 4.0  # a version that was read from files keeps the device for this many times the seconds that reading took


@dataclass(eq=False)
class WeightSet:
    """One version: where its weights are, and how many unfinished requests use it."""

    version_id: str
    slot: int | None  # its place in memory; None: its weights are only in its files
    directory: Path | None = None  # of its files, if they are known
    users: int = 0
    served: int = 0  # the number of its last turn
    retired: bool = False


class WeightVersions:
    """The sets of weights of one sampler; implements :class:`~twinkle.sampler.torch_sampler.versions.Versions`."""

    def __init__(self, trainer: Trainer, source: WeightSource | None, max_weight_sets: int | None = None) -> None:
        """Take memory for sets of weights from what the trainer set aside for adapters.

        trainer: holds the base model, which is never trained. source: gives the weights to publish; None: they come
        from files or other processes only. max_weight_sets: sets in memory beside the base model's own; None: up to 2,
        as many as fit. CapacityError: this many do not fit.
        """
        if max_weight_sets is not None and max_weight_sets < 0:
            raise InvalidInputError("max_weight_sets", max_weight_sets, "an integer ≥ 0 or None")
        self._source = source
        self._raise = "raise max_weight_sets of the sampler" if max_weight_sets == 0 else _RAISE_BUDGET
        self._set_bytes = sum(weight.nbytes for weight in named_weights(trainer.engine.model).values())
        self._available = int(trainer.memory.adapters * _SHARE)
        count = min(_DEFAULT_SETS, self._available // self._set_bytes) if max_weight_sets is None else max_weight_sets
        needed = count * self._set_bytes
        if needed > self._available:
            raise CapacityError(
                f"max_weight_sets: got {count}, which needs {needed} bytes ({needed / 2**30:.2f} GiB) of memory, "
                f"of which {self._available} are available; allowed: at most {self._available // self._set_bytes}; "
                + _RAISE_BUDGET
            )
        trainer.set_aside(needed)
        self._slots = WeightSlots(trainer.engine, count)
        self._layout = read_layout(trainer.engine.model)
        self._free = list(range(count, 0, -1))
        self._by_id: dict[str, WeightSet] = {}
        self._held: dict[int, WeightSet] = {}  # by place: a retired version keeps its own while requests use it
        self._forget: Forget = lambda _key: None
        self._turn = 0
        self._scopes: dict[str, int] = {}  # the number of each scope's last turn
        self._base_served = 0
        self._stays: tuple[WeightSet, float] | None = None  # a version that was read just now, and until when it stays

    @property
    def memory(self) -> str:
        size = f"{self._set_bytes / 2**30:.2f} GiB"
        return f"{self._slots.count} sets of weights beside the base model's, {size} each"

    def forget_with(self, forget: Forget) -> None:
        self._forget = forget

    # --- versions -----------------------------------------------------------------------------------------------------

    def publish(self, version_id: str, adapter_id: str) -> None:
        require_new(version_id, self._by_id)
        assert self._source is not None, "a sampler apart from its trainer receives weights"
        self._require_places()
        self._copy(version_id, self._source(adapter_id))

    def receive(self, version_id: str, config: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
        """Add a version from all weights of a model by the names of its checkpoint. ``config`` must be empty."""
        require_new(version_id, self._by_id)
        if config:
            raise InvalidInputError("config", sorted(config), "empty: these versions are complete sets of weights")
        self._copy(version_id, weights)

    def load(self, version_id: str, directory: str) -> None:
        """Examine a folder and read it, if there is a place for it now; else it is read when its turn comes."""
        require_new(version_id, self._by_id)
        self._require_places()
        new = WeightSet(version_id, None, Path(directory))
        weights = self._examined(new)
        slot = self._place(even_used=False)
        if slot is not None:
            self._fill(new, slot, weights)
        self._by_id[version_id] = new

    def saved(self, version_id: str, directory: str) -> None:
        """Note a version's files, which lets it give up its place in memory. Unknown ids are ignored."""
        if version_id in self._by_id:
            self._by_id[version_id].directory = Path(directory)

    def retire(self, version_id: str) -> None:
        version = self._by_id.pop(version_id, None)
        if version is not None:
            version.retired = True
            self._drop_unused(version)

    def ids(self) -> list[str]:
        return list(self._by_id)

    # --- requests -----------------------------------------------------------------------------------------------------

    def take(self, version_id: str) -> WeightSet:
        version = self._by_id.get(version_id)
        if version is None:
            raise unknown_version(version_id)
        version.users += 1
        return version

    def give_back(self, version: object) -> None:
        assert isinstance(version, WeightSet)
        version.users -= 1
        self._drop_unused(version)

    def bring(self, jobs: Sequence[Job]) -> Turn:
        """Choose the set of weights of this turn, and make the model compute with it."""
        lost: dict[int, TwinkleError] = {}
        chosen = self._choose(jobs, lost)
        if chosen is None and jobs and not any(job.version is None for job in jobs):
            return Turn(lambda job: False, 0, lost, stuck=not lost)
        self._turn += 1
        present = {job.scope for job in jobs}
        self._scopes = {scope: turn for scope, turn in self._scopes.items() if scope in present}
        self._scopes |= {job.scope: self._turn for job in jobs if job.version is chosen}
        if chosen is None:
            self._base_served = self._turn
        else:
            chosen.served = self._turn
        number = 0 if chosen is None or chosen.slot is None else chosen.slot
        self._slots.use(number)
        return Turn(lambda job: job.version is chosen, number, lost)

    def weight_sets(self) -> Sequence[int]:
        return range(self._slots.count + 1)

    def use_weights(self, number: int) -> None:
        self._slots.use(number)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _choose(self, jobs: Sequence[Job], lost: dict[int, TwinkleError]) -> WeightSet | None:
        """Return the version whose turn it is; None: the base model. Versions that cannot be read are noted."""
        if self._stays is not None:
            just_read, until = self._stays
            if just_read.slot is not None and perf_counter() < until and any(job.version is just_read for job in jobs):
                return just_read
            self._stays = None
        for job in sorted(jobs, key=self._last_served):
            version = job.version
            assert version is None or isinstance(version, WeightSet)
            if version is None or version.slot is not None:
                return version
            if id(version) not in lost and self._brought(version, lost):
                return version
        return None

    def _last_served(self, job: Job) -> tuple[int, int, int]:
        served = job.version.served if isinstance(job.version, WeightSet) else self._base_served
        return self._scopes.get(job.scope, 0), served, job.number

    def _brought(self, version: WeightSet, lost: dict[int, TwinkleError]) -> bool:
        """Read a version into memory, which may take the place of one in use. Return False if that is not possible."""
        if not self._free and self._next_to_leave(even_used=True) is None:
            return False  # all places are held by versions in use without files; one is free when its requests end
        began = perf_counter()
        try:
            weights = self._examined(version)
            slot = self._place(even_used=True)
            assert slot is not None, "checked above"
            self._fill(version, slot, weights)
        except CheckpointError as error:
            lost[id(version)] = error
            self._by_id.pop(version.version_id, None)
            version.retired = True
            return False
        self._stays = version, perf_counter() + _STAY * (perf_counter() - began)
        return True

    def _copy(self, version_id: str, weights: Mapping[str, Tensor]) -> None:
        self._require_places()
        self._slots.check(weights)
        slot = self._place(even_used=True)
        if slot is None:
            raise CapacityError(
                f"unfinished requests use all {self._slots.count} sets of weights, and one more {self._price(1)}; wait "
                "for the requests, or raise max_weight_sets of the sampler"
            )
        new = WeightSet(version_id, None)
        self._fill(new, slot, weights.items())
        self._by_id[version_id] = new

    def _examined(self, version: WeightSet) -> Iterator[tuple[str, Tensor]]:
        """Return the weights in a version's files, all of which are checked before the first is returned."""
        directory = version.directory
        assert directory is not None, "only versions with files are read"
        if (directory / _ADAPTER).exists():
            raise CheckpointError(
                f"{directory} holds a LoRA adapter: this model is served with train_mode: full, and is sampled from "
                "checkpoints with all weights"
            )
        return zip(self._layout.names, read_full(directory, self._layout, optimizer=False).weights, strict=True)

    def _fill(self, version: WeightSet, slot: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into a place. After an error the place is free again, and the version is not in it."""
        try:
            self._slots.fill(slot, weights)
        except BaseException:
            self._free.append(slot)
            raise
        version.slot, self._held[slot] = slot, version
        version.served = self._turn

    def _place(self, *, even_used: bool) -> int | None:
        """Return a free place, if need be that of another version; None if none can leave."""
        if self._free:
            return self._free.pop()
        leaving = self._next_to_leave(even_used=even_used)
        if leaving is None:
            return None
        slot, leaving.slot = leaving.slot, None
        assert slot is not None, "it holds a place"
        del self._held[slot]
        if leaving.directory is None:
            self.retire(leaving.version_id)
        return slot

    def _next_to_leave(self, *, even_used: bool) -> WeightSet | None:
        """Return the version that gives up its place next, the one served longest ago; None if none can.

        A version that no request uses leaves first; without files it is gone then. A version that requests use leaves
        only if it has files, and only if ``even_used``.
        """
        held = self._held.values()
        able = [one for one in held if not one.users or (even_used and one.directory is not None)]
        return min(able, key=lambda one: (one.users > 0, one.served), default=None)

    def _drop_unused(self, version: WeightSet) -> None:
        if version.retired and not version.users:
            self._forget(id(version))
            if version.slot is not None:
                self._free.append(version.slot)
                del self._held[version.slot]
                version.slot = None

    def _require_places(self) -> None:
        if not self._slots.count:
            raise CapacityError(f"a version is a second set of weights, and {self._price(1)}; {self._raise}")

    def _price(self, count: int) -> str:
        needed, available = count * self._set_bytes, max(0, self._available - self._slots.count * self._set_bytes)
        return f"needs {needed} bytes ({needed / 2**30:.2f} GiB) of memory, of which {available} are available"
