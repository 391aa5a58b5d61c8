"""Sampling from a live adapter as it is now: an immutable version of its present weights, made when somebody asks."""

from dataclasses import dataclass

from twinkle.errors import UnsupportedError
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.services.training.live_adapter import LiveAdapter, Place
from twinkle.server.services.training.runner import OpRunner

# Older ones may still be wanted by requests that have not reached the sampler yet.
_KEPT = 3


@dataclass(frozen=True)
class LiveVersion:
    """``outdated``: versions of earlier weights that nobody will be sent to again."""

    version_id: str
    outdated: tuple[str, ...]


class LiveVersions:
    """Versions of one model's adapters, by run and by the last op that changed the weights."""

    def __init__(self, model: ServedModel, runner: OpRunner, compute: Compute) -> None:
        self._model = model
        self._runner = runner
        self._compute = compute

    async def of(self, adapter: LiveAdapter) -> LiveVersion | None:
        """None if the adapter was not created, or is just leaving."""
        if self._model.sampler is None:
            raise UnsupportedError(f"{self._model.name} is served for training only")
        while self._is_coming(adapter) and not self._runner.stopping:
            await adapter.next_end()
        with adapter.in_use():
            return await self._version(adapter)

    async def _version(self, adapter: LiveAdapter) -> LiveVersion | None:
        if not await self._runner.load(adapter):
            return None
        run_id = adapter.run.run_id
        version_id = f"{run_id}@{adapter.changed_seq}"
        if not await self._compute.run(lambda: self._publish(version_id, run_id)):
            return None
        if version_id not in adapter.versions:
            adapter.versions.append(version_id)
        outdated, adapter.versions = adapter.versions[:-_KEPT], adapter.versions[-_KEPT:]
        return LiveVersion(version_id, tuple(outdated))

    def _is_coming(self, adapter: LiveAdapter) -> bool:
        """Not created yet, or not yet again what it was before a restart."""
        return adapter.repeats or (adapter.place is Place.NOWHERE and 0 in adapter.unfinished)

    def _publish(self, version_id: str, run_id: str) -> bool:
        """In the compute thread, where no optimizer step is half done."""
        sampler = self._model.sampler
        assert sampler is not None, "checked before"
        if run_id not in self._model.trainer.adapter_ids():
            return False
        if version_id not in sampler.version_ids():
            sampler.publish(version_id, run_id)
        return True
