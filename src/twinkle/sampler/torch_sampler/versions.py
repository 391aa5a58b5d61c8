"""What a sampler samples from beside its base model: its versions, and which of them take part in a turn.

:class:`AdapterVersions` holds frozen adapters, of which many share a turn. Complete sets of weights, of which one is
used at a time, are in :mod:`twinkle.sampler.weight_sets`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError, TwinkleError
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.trainer.trainer import Trainer
from twinkle.sampler.torch_sampler.jobs import Job
from twinkle.sampler.torch_sampler.schedule import Eligible

Forget = Callable[[int], None]  # called with id() of a version that is gone


@dataclass(frozen=True)
class Turn:
    """What one turn computes: the jobs for which ``eligible`` returns True.

    ``weights``: the number of the set of weights that the model has in this turn; 0 is the base model's own.
    ``lost``: the versions, by ``id()``, whose weights are gone; their jobs have to fail with the error. ``stuck``: none
    of the given jobs can be computed before others, which were not among them, have ended.
    """

    eligible: Eligible
    weights: int = 0
    lost: Mapping[int, TwinkleError] = field(default_factory=dict)
    stuck: bool = False


class Versions(Protocol):
    """The versions of one sampler. A version that requests use stays until they are finished."""

    def forget_with(self, forget: Forget) -> None:
        """Have this function called when a version is gone: what was cached for it is useless then."""

    def publish(self, version_id: str, adapter_id: str) -> None:
        """Copy the present weights of an adapter as a new version."""

    def load(self, version_id: str, directory: str) -> None:
        """Read a new version from a directory."""

    def receive(self, version_id: str, config: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
        """Add a version from weights of another process."""

    def saved(self, version_id: str, directory: str) -> None:
        """Note that the weights of a version are in this directory too. Unknown ids are ignored."""

    def retire(self, version_id: str) -> None:
        """Drop a version once no request uses it. Unknown ids are ignored."""

    def ids(self) -> list[str]: ...

    def take(self, version_id: str) -> object:
        """Return a version for one more request. InvalidInputError: there is none with this id."""

    def give_back(self, version: object) -> None:
        """Note that one request that took the version is finished."""

    def bring(self, jobs: Sequence[Job]) -> Turn:
        """Prepare a turn for some of these jobs, which are running or could get a place now."""

    def weight_sets(self) -> Sequence[int]:
        """Return the numbers of all sets of weights that a turn may use."""

    def use_weights(self, number: int) -> None:
        """Make the model compute with a set of weights."""

    @property
    def memory(self) -> str:
        """Describe the memory that versions take in a few words, for logs; empty if they take none of their own."""


class AdapterVersions:
    """Frozen adapters on one base model, in the memory that its trainer has for adapters."""

    def __init__(self, trainer: Trainer, publisher: Trainer | None = None) -> None:
        """``publisher``: the trainer whose adapters are published; None: ``trainer``, which has the base model."""
        self._trainer = trainer
        self._publisher = trainer if publisher is None else publisher
        self._by_id: dict[str, Adapter] = {}
        self._users: dict[int, int] = {}  # unfinished requests, by id() of their version
        self._retired: dict[int, Adapter] = {}  # retired, but still used by requests
        self._forget: Forget = lambda _key: None

    def __getitem__(self, version_id: str) -> Adapter:
        return self._by_id[version_id]

    @property
    def memory(self) -> str:
        return ""

    def forget_with(self, forget: Forget) -> None:
        self._forget = forget

    def publish(self, version_id: str, adapter_id: str) -> None:
        if self._publisher is not self._trainer:
            self.receive(version_id, *self._publisher.peft_adapter(adapter_id, torch.float32))
            return
        require_new(version_id, self._by_id)
        self._by_id[version_id] = self._trainer.pool.freeze(adapter_id)

    def load(self, version_id: str, directory: str) -> None:
        require_new(version_id, self._by_id)
        self._add(version_id, self._trainer.frozen_from_checkpoint(directory))

    def receive(self, version_id: str, config: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
        """Add a version from weights named as PEFT does, and their adapter_config.json."""
        require_new(version_id, self._by_id)
        self._add(version_id, self._trainer.frozen_from_weights(config, weights))

    def saved(self, version_id: str, directory: str) -> None:
        """Do nothing: adapters are small, and stay in memory until they are retired."""

    def retire(self, version_id: str) -> None:
        version = self._by_id.pop(version_id, None)
        if version is None:
            return
        if self._users.get(id(version)):
            self._retired[id(version)] = version
        else:
            self._remove(version)

    def ids(self) -> list[str]:
        return list(self._by_id)

    def take(self, version_id: str) -> Adapter:
        version = self._by_id.get(version_id)
        if version is None:
            raise unknown_version(version_id)
        self._users[id(version)] = self._users.get(id(version), 0) + 1
        return version

    def give_back(self, version: object) -> None:
        self._users[id(version)] -= 1
        if not self._users[id(version)]:
            del self._users[id(version)]
            retired = self._retired.pop(id(version), None)
            if retired is not None:
                self._remove(retired)

    def bring(self, jobs: Sequence[Job]) -> Turn:
        """Make versions resident for this turn: the least recently used ones, as many as fit together."""
        versions = list({id(job.adapter): job.adapter for job in jobs if job.adapter is not None}.values())
        chosen: list[Adapter] = []
        for version in sorted(versions, key=lambda each: each.last_used):
            if not self._trainer.pool.fit([*chosen, version]):
                break
            chosen.append(version)
        self._trainer.pool.make_resident(chosen)
        present = {id(version) for version in chosen}
        return Turn(lambda job: job.version is None or id(job.version) in present)

    def weight_sets(self) -> Sequence[int]:
        return (0,)

    def use_weights(self, number: int) -> None:
        """Do nothing: adapters are added to the one set of weights that there is."""

    def _add(self, version_id: str, version: Adapter) -> None:
        self._trainer.pool.add_version(version)
        self._by_id[version_id] = version

    def _remove(self, version: Adapter) -> None:
        self._forget(id(version))
        self._trainer.pool.remove_version(version)


def require_new(version_id: str, known: Mapping[str, object]) -> None:
    if not isinstance(version_id, str) or not version_id:
        raise InvalidInputError("version_id", version_id, "a string that is not empty")
    if version_id in known:
        raise InvalidInputError("version_id", version_id, "an id that no version has: versions never change")


def unknown_version(version_id: str) -> InvalidInputError:
    return InvalidInputError("version_id", version_id, "a published version, or None for the base model")
