"""The sampler service: samples of one base model and of its tenants' published versions.

Requests wait here until the compute thread has a turn for them. Samples are not journalled: they change nothing, and a
client that asks for one lost in a restart is told so and sends it again.
"""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from twinkle.errors import GoneError, QuotaError, TwinkleError
from twinkle.sampler.types import Finished, SampleFailure, Sampler, SampleRequest
from twinkle.server.checkpoints import without_server_paths
from twinkle.server.compute import Compute
from twinkle.server.execution import failure_of, unexpected
from twinkle.server.files import DataDir
from twinkle.server.futures import Futures
from twinkle.server.types import Outcome, SamplingSessionRecord
from twinkle.server.wire.sampling import encode_sample_result

logger = logging.getLogger(__name__)

# Versions beyond this are dropped, least recently used first; they come back from disk when they are asked for.
_MAX_VERSIONS = 64


@dataclass(frozen=True)
class _Waiting:
    request: SampleRequest
    session: SamplingSessionRecord


class SamplerService:
    def __init__(
        self,
        sampler: Sampler,
        compute: Compute,
        files: DataDir,
        *,
        max_waiting: int = 4096,
        max_unfetched_bytes: int = 2**30,
        futures: Futures | None = None,
    ) -> None:
        self._sampler = sampler
        self.tokens_sampled = 0
        self.busy_seconds = 0.0
        self._compute = compute
        self._files = files
        self._futures = futures or Futures()
        self._max_waiting = max_waiting
        self._max_unfetched_bytes = max_unfetched_bytes
        self._waiting: list[_Waiting] = []
        self._tenants: dict[str, str] = {}  # of every request under way
        self._running: set[str] = set()  # what the sampler has; of the compute thread
        self._last_used: dict[str, float] = {}  # by version
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        self._pump = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._pump is not None:
            await self._pump

    def sample(self, session: SamplingSessionRecord, request: SampleRequest) -> None:
        """Take in a request; the same id again is the same request."""
        if request.request_id in self._futures:
            return
        waiting = Counter(self._tenants.values())[session.tenant_id]
        if waiting >= self._max_waiting:
            raise QuotaError("waiting samples", waiting, self._max_waiting)
        unfetched = self._futures.unfetched_bytes(session.tenant_id)
        if unfetched >= self._max_unfetched_bytes:
            raise QuotaError("bytes of results not fetched", unfetched, self._max_unfetched_bytes)
        self._futures.promise(request.request_id, session.tenant_id)
        self._tenants[request.request_id] = session.tenant_id
        self._waiting.append(_Waiting(request, session))
        self._wake.set()

    async def wait(self, request_id: str, timeout: float) -> Outcome | None:
        if request_id not in self._futures:
            raise GoneError(f"sample {request_id} was lost in a restart or is too old: send it again")
        return await self._futures.wait(request_id, timeout, time.time())

    def sweep(self, now: float) -> None:
        self._futures.sweep(now)
        self._futures.take_delivered()

    def release_waiters(self) -> None:
        self._futures.close()

    def status(self) -> dict[str, object]:
        return {
            "waiting_samples": len(self._tenants),
            "sampled_tokens": self.tokens_sampled,
            "sampling_seconds": round(self.busy_seconds, 3),
        }

    async def _run(self) -> None:
        busy = False
        while not self._stopping:
            if not busy and not self._waiting:
                await self._wake.wait()
            self._wake.clear()
            fresh, self._waiting = self._waiting, []
            outcomes, busy = await self._compute.run(partial(self._turn, fresh))
            for request_id, outcome in outcomes.items():
                self._tenants.pop(request_id, None)
                self._futures.settle(request_id, outcome, time.time())

    # --- in the compute thread ----------------------------------------------------------------------------------------

    def _turn(self, fresh: list[_Waiting]) -> tuple[dict[str, Outcome], bool]:
        """Admit what is new, work for a while; returns what is done and whether there is more to do."""
        started = time.perf_counter()
        outcomes: dict[str, Outcome] = {}
        sampler = self._sampler
        for waiting in fresh:
            try:
                self._ensure_version(waiting.session)
                sampler.submit(waiting.request)
                self._running.add(waiting.request.request_id)
            except TwinkleError as error:
                outcomes[waiting.request.request_id] = failure_of(error, waiting.request.request_id)
            except Exception as error:  # noqa: BLE001 - the sampler loop is an edge
                outcomes[waiting.request.request_id] = unexpected(error, waiting.request.request_id)
        try:
            for finished in sampler.step():
                outcomes[finished.request_id] = self._encode(finished)
            self._drop_old_versions()
        except Exception as error:  # noqa: BLE001 - as above; nobody may wait for ever
            for request_id in self._running - set(outcomes):
                sampler.cancel(request_id)
                outcomes[request_id] = unexpected(error, request_id)
        self._running -= set(outcomes)
        self.busy_seconds += time.perf_counter() - started
        return outcomes, sampler.busy

    def _encode(self, finished: Finished) -> Outcome:
        if isinstance(finished.outcome, SampleFailure):
            return failure_of(finished.outcome.error, finished.request_id)
        self.tokens_sampled += sum(len(sequence.tokens) for sequence in finished.outcome.sequences)
        try:
            return encode_sample_result(finished.outcome)
        except Exception as error:  # noqa: BLE001 - as above: what cannot be sent fails its own request alone
            return unexpected(error, finished.request_id)

    def _ensure_version(self, session: SamplingSessionRecord) -> None:
        version_id = session.version_id
        if version_id is None:
            return
        self._last_used[version_id] = time.monotonic()
        if version_id not in self._sampler.version_ids():
            assert session.directory is not None, "a version has files"
            directory: Path = self._files.root / session.directory
            path = session.model_path or session.sampling_session_id
            without_server_paths(lambda: self._sampler.load_version(version_id, str(directory)), directory, path)

    def _drop_old_versions(self) -> None:
        loaded = self._sampler.version_ids()
        for version_id in loaded:  # one that was just published was not asked for yet
            self._last_used.setdefault(version_id, time.monotonic())
        by_age = sorted(loaded, key=self._last_used.__getitem__)
        for version_id in by_age[: max(0, len(loaded) - _MAX_VERSIONS)]:
            self._sampler.retire(version_id)
            self._last_used.pop(version_id, None)
