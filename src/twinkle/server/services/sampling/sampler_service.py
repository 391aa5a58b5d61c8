"""The sampling service: samples from one base model and from its tenants' published versions.

Requests wait here until the engine has room for them and the compute thread has time; tenants take turns. Samples are
not in the journal, because they change nothing: a client that asks for a sample that was lost in a restart gets an
error that says so, and sends its request again. The samples of clients that have vanished are cancelled; a client that
comes back gets the same error.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from twinkle.errors import GoneError, InvalidInputError, ShuttingDownError, TwinkleError
from twinkle.images import SentImages
from twinkle.sampler.types import (
    CountsSteps,
    EndsTurns,
    Finished,
    Progress,
    SampleFailure,
    Sampler,
    SampleRequest,
    SampleResult,
    SamplerNumbers,
)
from twinkle.sampler.validation import MAX_CELLS
from twinkle.server.backends.compute_thread import Compute, Lane
from twinkle.server.ids import RequestId
from twinkle.server.scheduling.fair_queue import FairQueue
from twinkle.server.scheduling.gathering import Gathering
from twinkle.server.services.futures import Delivery, Futures
from twinkle.server.services.images import RequestImages
from twinkle.server.services.sampling.completions import Completions
from twinkle.server.services.sampling.jobs import EventQueue, SampleAdmission, SampleEvent, SampleJob, price_of
from twinkle.server.services.sampling.versions import SamplerVersions
from twinkle.server.services.service_loop import ServiceLoop
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.telemetry.logs import note_request_id
from twinkle.server.telemetry.metrics import Reading
from twinkle.server.telemetry.readings import queue_readings, sampler_readings
from twinkle.server.telemetry.recording import Outcomes, SamplingRecorder
from twinkle.server.tenancy.memory import ProcessMemory
from twinkle.server.tenancy.rate_limit import RecentRate
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import Outcome, SamplingSessionRecord, Tally
from twinkle.server.wire.sampling import Encode, encode_sample_result

logger = logging.getLogger(__name__)

# The largest tables of one request in bytes: the engine itself refuses a request that asks for more.
_MOST_RESULT_BYTES = 16 * MAX_CELLS


@dataclass(frozen=True)
class _Orders:
    """What the event loop asks of the next turn: requests to cancel, versions to release, requests to begin."""

    cancelled: Sequence[str]
    released: Sequence[str]
    fresh: Sequence[SampleJob]


class SamplerService:
    """The sampling service of one base model.

    Belongs to one event loop; only ``_turn`` and the methods that it calls run in the compute thread, and ``_deliver``
    runs in a thread of its own. While the engine has work, one turn follows the other: the compute thread does not wait
    until the event loop has handled the events of a turn.
    """

    def __init__(
        self,
        sampler: Sampler,
        compute: Compute,
        files: DataDir,
        *,
        tenants: Tenants | None = None,
        context: int = 2**15,
        futures: Futures | None = None,
        memory: ProcessMemory | None = None,
        max_versions: int = 64,
        idle_version_seconds: float = 1800.0,
        mark_version_seconds: float = 30.0,
        engine_samples: int = 256,
        completion_streams: bool = True,
        computes_here: bool = True,
        recorder: SamplingRecorder | None = None,
        gathering: Gathering | None = None,
        images: RequestImages | None = None,
    ) -> None:
        """Make a service that is not started yet.

        context: the most tokens of prompt and sample together.
        max_versions, idle_version_seconds: versions beyond this number or this idle time are dropped from memory; a
        saved one is read from disk with the next request for it. mark_version_seconds: the least time between marks of
        a version's files, which say that it is used.
        engine_samples: how many samples the engine gets at a time. With more, the first tenants would keep others out;
        for the same reason one tenant gets at most three quarters of them.
        completion_streams: whether clients may wait for all of their samples with one poll.
        computes_here: the sampler computes in its turns of the compute thread. If not, because it has processes of its
        own as vLLM does, a turn only fetches what they have sampled, and training does not wait for the next one.
        gathering: is told when a session begins and ends to sample, because its next training pass comes after that.
        images: reads the images of prompts; None: there are none.
        """
        self._sampler = sampler
        self._computes_here = computes_here
        self._compute = compute
        if isinstance(sampler, EndsTurns):
            sampler.end_turns_when(compute.training_is_next)
        self._recorder = recorder or SamplingRecorder("sampler")
        self._gathering = gathering or Gathering()
        self._images = images
        memory = memory or ProcessMemory()
        self._guard = memory.guard
        self._guard.relieve_with(self._drop_versions_soon)
        self._futures = futures or Futures(memory=memory.results)
        self.completions = Completions() if completion_streams else None
        self._tenants = tenants = tenants or Tenants()
        self.admission = SampleAdmission(tenants, self._futures, engine_samples)
        self._context = context
        self._jobs: dict[str, SampleJob] = {}  # all requests that have not ended, by request id
        self._queued: dict[str, float] = {}  # those that the engine has not begun, and since when; the oldest first
        self._asked: dict[str, float] = {}  # monotonic time of the last request or poll, by sampling session
        self._asking = Tally()  # long polls that wait now, by sampling session
        self._numbers: dict[tuple[str, int], set[int]] = {}  # sequence numbers in _jobs, by sampling session and client
        self._queue: FairQueue[SampleJob] = FairQueue(tenants.share)  # jobs that no turn has been given yet
        self._cancelled: list[str] = []  # request ids that the next turn cancels in the engine
        self._released_versions: list[str] = []  # versions that the next turn releases
        self._orders: deque[_Orders] = deque()  # for the next turn, which takes them out
        self._wake = asyncio.Event()
        self._turn_due = False  # a turn is needed even if there are no requests
        self.loop = ServiceLoop("sampling")
        self._encoding = ThreadPoolExecutor(1, "samples")  # encodes results in the order in which they came
        self._closed = False
        self._stopping = False
        self.tokens_sampled = 0
        self.busy_seconds = 0.0
        self._rate = RecentRate(time.time())
        # State of the compute thread:
        self._running: dict[str, SampleJob] = {}
        self._versions = SamplerVersions(
            sampler,
            files,
            most=max_versions,
            idle_seconds=idle_version_seconds,
            mark_seconds=mark_version_seconds,
        )

    async def start(self) -> None:
        self.loop.start(self._run())

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        await self.loop.ended()
        for job in list(self._jobs.values()):
            self._end(job, ShuttingDownError())

    # --- requests -----------------------------------------------------------------------------------------------------

    def sample(
        self,
        session: SamplingSessionRecord,
        request: SampleRequest,
        *,
        digest: bytes = b"",
        encode: Encode = encode_sample_result,
        pixels: int = 0,
    ) -> None:
        """Accept a request whose future is awaited with :meth:`wait`. A repeated request has no effect.

        ``pixels``: how many the files of its images have. InvalidInputError: another request, with another ``digest``,
        has this request id.
        """
        known = self._futures.digest(request.request_id)
        if known is None:
            self._accept(request, session, encode, pixels)
            self._asked[session.sampling_session_id] = time.monotonic()
            self._futures.promise(request.request_id, session.tenant_id, digest)
        elif known != digest:
            number = RequestId.parse(request.request_id).number
            raise InvalidInputError("seq_id", number, "a number that no other request of this sampler has used")

    async def read_images(
        self, session: SamplingSessionRecord, request: SampleRequest, sent: SentImages
    ) -> tuple[SampleRequest, int]:
        """Return a request with its images in its prompt, and how many pixels their files have.

        As :meth:`read_all_images`, but a repeated request is returned unchanged.
        """
        if self._futures.digest(request.request_id) is not None:
            return request, 0
        (read,), (pixels,) = await self.read_all_images(session, [request], [sent])
        return read, pixels

    async def read_all_images(
        self, session: SamplingSessionRecord, requests: Sequence[SampleRequest], sent: Sequence[SentImages]
    ) -> tuple[list[SampleRequest], list[int]]:
        """Return requests that a client sent as one with their images, and how many pixels the files of each have.

        They are decoded in a pool of threads. An error is raised before that if the requests would not be accepted now,
        as :meth:`sample` does it, or if all of them together exceed a limit on one request.
        """
        assert self._images is not None, "the service was made to read images"
        tenant_id = session.tenant_id
        self.admission.check(tenant_id)
        limits = self._tenants.limits(tenant_id)
        placed, pixels = await self._images.place_in_prompts(requests, sent, tenant_id, limits)
        prices = (price_of(each, self._context, seen) for each, seen in zip(placed, pixels, strict=True))
        self._guard.check(sum(price.held_bytes for price in prices))
        return await self._images.decode_prompts(placed, sent, tenant_id, limits), pixels

    async def generate(
        self, session: SamplingSessionRecord, requests: Sequence[SampleRequest], pixels: Sequence[int] = ()
    ) -> AsyncGenerator[tuple[int, Progress | SampleResult], None]:
        """Sample several requests together; yield events, each with the index of its request in ``requests``.

        ``pixels``: how many the files of each request's images have; empty if no request has images. A request yields
        progress if its ``stream`` is set, and at last its result. The first error of any request is raised as a
        TwinkleError. If the caller stops before the end, all requests are cancelled.
        """
        if self._closed:
            raise ShuttingDownError
        events: EventQueue = asyncio.Queue()
        jobs: dict[str, SampleJob] = {}
        try:
            for request, seen in zip(requests, pixels or [0] * len(requests), strict=True):
                jobs[request.request_id] = self._accept(request, session, events, seen)
            places = {request_id: place for place, request_id in enumerate(jobs)}
            running = len(jobs)
            while running:
                request_id, event = await events.get()
                if isinstance(event, TwinkleError):
                    raise event
                running -= isinstance(event, SampleResult)
                yield places[request_id], event
        finally:
            for job in jobs.values():
                self._withdraw(job)

    async def results(
        self, session: SamplingSessionRecord, requests: Sequence[SampleRequest], pixels: Sequence[int] = ()
    ) -> list[SampleResult]:
        """Sample several requests together, and return their results in the same order. Progress is left out.

        ``pixels``: as in :meth:`generate`.
        """
        async with aclosing(self.generate(session, requests, pixels)) as events:
            results = {place: event async for place, event in events if isinstance(event, SampleResult)}
        return [results[place] for place in range(len(requests))]

    async def wait(self, request: RequestId, timeout: float) -> Outcome | None:
        """Return the outcome of a sample, or None if there is none after ``timeout`` seconds or at shutdown.

        GoneError: the sample is unknown, so its client has to send it again.
        """
        request_id = str(request)
        note_request_id(request_id)
        if request_id not in self._futures:
            raise GoneError(
                f"sample {request_id} was lost in a restart, was cancelled because nobody asked for it, was fetched "
                "before, or is too old: send it again"
            )
        with self.being_asked(request.owner):
            return await self._futures.wait(request_id, timeout)

    def why_queued(self, request_id: str) -> str | None:
        """Return a sentence for the client of a sample that the engine has not begun; None once it has."""
        since = self._queued.get(request_id)
        if since is None:
            return None
        seconds, others = time.monotonic() - since, len(self._queued) - 1
        beside = "no other sample is" if others == 0 else "1 other is" if others == 1 else f"{others} others are"
        return f"queued for {seconds:.0f} s, {beside} queued; training and other samples use the device"

    def counts(self, tenant_id: str) -> tuple[int, int]:
        """Return how many samples of a tenant are queued, and how many the engine has begun."""
        own = [job.request_id in self._queued for job in self._jobs.values() if job.tenant_id == tenant_id]
        return sum(own), len(own) - sum(own)

    @contextmanager
    def delivering(self, request_id: str) -> Iterator[Delivery]:
        """Keep a result in memory while it is written to a client. The writer sets ``complete`` after the last byte."""
        with self._futures.delivering(request_id, time.time()) as delivery:
            yield delivery
        self._wake.set()  # the tenant may be below its limit on unfetched results again

    def cancel(self, request_id: str) -> None:
        """Cancel a sample for its client: its future fails. No effect on a sample that has ended or is streamed."""
        job = self._jobs.get(request_id)
        if job is not None and not job.streamed:
            self._withdraw(job)
            self._settle(request_id, Outcome.failure("cancelled by its client", "user"))

    @contextmanager
    def being_asked(self, sampling_session_id: str) -> Iterator[None]:
        """Note, for the duration of a ``with`` block, that a client of the sampling session waits for samples.

        Meanwhile :meth:`cancel_unasked` leaves the samples of the sampling session alone.
        """
        with self._asking.counting(sampling_session_id):
            try:
                yield
            finally:
                self._asked[sampling_session_id] = time.monotonic()

    def unasked_sessions(self, seconds: float) -> set[str]:
        """Return the ids of the sessions that have unfinished samples for which nobody has asked in the last
        ``seconds``: their sampling session had neither a new sample nor a poll.
        """
        return {job.session.session_id for job in self._unasked(seconds)}

    def cancel_unasked(self, session_id: str, seconds: float) -> int:
        """Cancel those samples of a session for which nobody has asked in the last ``seconds``; return their number.

        Their futures are removed, not failed: a client that comes back gets the error that says to send the request
        again, which SDKs do.
        """
        cancelled = [job for job in self._unasked(seconds) if job.session.session_id == session_id]
        for job in cancelled:
            self._withdraw(job)
            self._futures.forget(job.request_id)
            if self.completions is not None:
                self.completions.add(job.request_id, None, time.time())
        return len(cancelled)

    def _unasked(self, seconds: float) -> list[SampleJob]:
        """Return the jobs whose sampling session had neither a new sample nor a poll in the last ``seconds``. Streamed
        jobs are left out: they end when their HTTP connection ends.
        """
        before = time.monotonic() - seconds
        waiting = (job for job in self._jobs.values() if not job.streamed)
        named = ((job, job.session.sampling_session_id) for job in waiting)
        return [job for job, name in named if name not in self._asking and self._asked.get(name, 0.0) < before]

    def release_version(self, version_id: str) -> None:
        """Have a version that no session needs any more dropped, as soon as no request uses it."""
        self._released_versions.append(version_id)
        self._wake.set()

    # --- completions --------------------------------------------------------------------------------------------------

    def acknowledge(self, sampling_session_id: str, request_ids: Sequence[str]) -> None:
        """Forget results, because their client has confirmed that it has them."""
        for request_id in request_ids:
            request = RequestId.parse_or_none(request_id)
            if request is not None and request.owner == sampling_session_id:
                self._futures.acknowledge(request_id)
        self._wake.set()  # the tenant may be below its limit on unfetched results again

    def report_lost(self, sampling_session_id: str, numbers: range) -> None:
        """Add those of the numbers that are unknown here to the client's completion stream.

        When the client then asks for such a sample, it gets the error that says to send the request again.
        """
        assert self.completions is not None, "only a client with a stream can be told"
        now = time.time()
        for number in numbers:
            request_id = str(RequestId(sampling_session_id, number))
            if request_id not in self._futures:
                self.completions.add(request_id, None, now)

    def lowest_number(self, sampling_session_id: str, seq_id: int) -> int:
        """Return the lowest sequence number that the client which now uses ``seq_id`` may be waiting for.

        A sample that is done counts until the client has confirmed its completion: after a restart the server would not
        know it, and would have to report it as lost.
        """
        client = RequestId(sampling_session_id, seq_id).client
        untold = () if self.completions is None else self.completions.numbers(*client)
        return min([seq_id, *self._numbers.get(client, ()), *untold])

    # --- maintenance --------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Forget old results and completions, and make the next turn drop unused versions. Called by maintenance."""
        self._futures.sweep(now)
        self._futures.take_delivered()
        if self.completions is not None:
            self.completions.sweep(now, self._futures.delivered)
        self._rate.record(self.tokens_sampled, now)
        under_way = self.sessions_under_way()
        self._asked = {name: at for name, at in self._asked.items() if name in under_way}
        self._turn_due = True  # a turn drops old versions; they are published and expire without any sampling, too
        self._wake.set()

    def sessions_under_way(self) -> frozenset[str]:
        """Return the sampling sessions that have requests which have not ended."""
        return frozenset(job.session.sampling_session_id for job in self._jobs.values())

    def _drop_versions_soon(self) -> int:
        """Make the next turn drop versions that no request uses. Return 0: no bytes are dropped before that turn."""
        self._turn_due = True
        self._wake.set()
        return 0

    def release_waiters(self) -> None:
        """Answer all long polls, now and from now on, because the server shuts down. Streamed requests are cancelled,
        and their readers get ShuttingDownError.
        """
        self._futures.close()
        if self.completions is not None:
            self.completions.close()
        self._closed = True
        for job in list(self._jobs.values()):
            if job.streamed:
                self._withdraw(job)
                job.send(ShuttingDownError())

    def readings(self, model: str) -> Iterator[Reading]:
        """Yield the metrics that are computed when /metrics is read."""
        polls = self._futures.polls + (0 if self.completions is None else self.completions.polls)
        unfetched, waiting = self._futures.all_unfetched_bytes, len(self._jobs)
        yield from queue_readings(model, "sampling", waiting, polls, unfetched, self.busy_seconds)
        if (numbers := self._numbers_of_sampler()) is not None:
            yield from sampler_readings(model, numbers)

    def _numbers_of_sampler(self) -> SamplerNumbers | None:
        return self._sampler.numbers() if isinstance(self._sampler, CountsSteps) else None

    def status(self) -> dict[str, object]:
        now, numbers = time.monotonic(), self._numbers_of_sampler()
        counted = (
            {} if numbers is None else {"decode_steps": numbers.decode_steps, "decoded_tokens": numbers.decoded_tokens}
        )
        return {
            "waiting_samples": len(self._jobs),
            "queued_samples": len(self._queued),
            "oldest_sample_wait": round(now - next(iter(self._queued.values()), now), 1),
            "sampled_tokens": self.tokens_sampled,
            "sampling_tokens_per_second": self._rate.rate(self.tokens_sampled, time.time()),
            "sampling_seconds": round(self.busy_seconds, 3),
            **counted,
        }

    # --- the service loop ---------------------------------------------------------------------------------------------

    def _accept(
        self, request: SampleRequest, session: SamplingSessionRecord, into: Encode | EventQueue, pixels: int = 0
    ) -> SampleJob:
        if request.request_id in self._jobs:
            raise InvalidInputError("request_id", request.request_id, "an id that no request under way has")
        self._guard.check(min(_result_bytes(request), _MOST_RESULT_BYTES))
        job = self.admission.enter(SampleJob(request, session, into, price_of(request, self._context, pixels)))
        self._jobs[job.request_id] = job
        self._queued[job.request_id] = time.monotonic()
        if job.numbered is not None:
            self._numbers.setdefault(job.numbered.client, set()).add(job.numbered.number)
        self._recorder.accepted(job.request)
        self._gathering.sampling(job.session.session_id, time.monotonic())
        self._queue.push(job.tenant_id, job.request_id, job, job.price.cost)
        self._wake.set()
        return job

    def _withdraw(self, job: SampleJob) -> None:
        """Remove a request that has not ended, here and from the engine. If it was in the engine, it stays charged."""
        if self._jobs.get(job.request_id) is not job:
            return
        if self._queue.remove(job.tenant_id, job.request_id):
            self.admission.give_back(job, used=0)
        else:
            self.admission.stop(job)
            self._cancelled.append(job.request_id)
        self._leave(job)
        self._recorder.ended(job.request_id, Outcomes.CANCELLED)
        self._wake.set()

    def _leave(self, job: SampleJob) -> None:
        """Remove a job that has ended or was withdrawn from the service's own state."""
        del self._jobs[job.request_id]
        self._gathering.sampled(job.session.session_id, time.monotonic())
        self._queued.pop(job.request_id, None)
        self.admission.leave(job)
        if job.numbered is not None:
            numbers = self._numbers[job.numbered.client]
            numbers.remove(job.numbered.number)
            if not numbers:
                del self._numbers[job.numbered.client]

    def _settle(self, request_id: str, outcome: Outcome) -> None:
        now = time.time()
        self._futures.settle(request_id, outcome, now)
        if self.completions is not None:
            self.completions.add(request_id, None if outcome.failed else len(outcome.body), now)

    async def _run(self) -> None:
        event_loop = asyncio.get_running_loop()
        turns: asyncio.Future[bool] | None = None
        busy = False  # the engine has unfinished requests
        while not self._stopping or turns is not None:
            self._give_orders()
            if turns is None and (busy or self._orders):
                turns = asyncio.ensure_future(self._take_turns(event_loop))
                turns.add_done_callback(lambda _turns: self._wake.set())
            await self._wake.wait()
            self._wake.clear()
            if turns is not None and turns.done():
                busy, turns = turns.result(), None
        await event_loop.run_in_executor(self._encoding, lambda: None)  # the results of the last turn are handed over
        self._encoding.shutdown()

    async def _take_turns(self, event_loop: asyncio.AbstractEventLoop) -> bool:
        """Have the compute thread take turns until the engine has nothing to do or the service stops.

        Return whether the engine has more to do. A sampler that computes elsewhere takes one turn.
        """
        return await self._compute.run(
            lambda: self._turn(event_loop),
            Lane.SAMPLING,
            repeats=lambda busy: (busy or bool(self._orders)) and self._computes_here and not self._stopping,
        )

    def _give_orders(self) -> None:
        """Give the next turn what is to be cancelled and released, and the queued jobs that the engine has room for."""
        if self._computes_here:
            self._compute.put_off_sampling(self._gathering.patience())
        orders = _Orders(self._cancelled, self._released_versions, self._next_jobs())
        if orders.cancelled or orders.released or orders.fresh or self._turn_due:
            self._orders.append(orders)
        self._cancelled, self._released_versions, self._turn_due = [], [], False

    def _next_jobs(self) -> list[SampleJob]:
        """Take the jobs from the queue that the engine has room for."""
        fresh = []
        while (job := self._queue.pop(self.admission.may_start)) is not None:
            self.admission.start(job)
            fresh.append(job)
        return fresh

    def _begun(self, jobs: Sequence[SampleJob]) -> None:
        for job in jobs:
            self._queued.pop(job.request_id, None)

    def _hand_over(self, event: SampleEvent) -> None:
        job, result = event.job, event.result
        if self._jobs.get(job.request_id) is not job:
            return  # it was withdrawn while the turn ran
        if not isinstance(result, Progress):
            self.admission.stop(job)
            self.admission.count(event)
            self._end(job, result)
        else:
            job.send(result)

    def _end(self, job: SampleJob, event: SampleResult | TwinkleError | Outcome) -> None:
        self._leave(job)
        self._recorder.ended(job.request_id, Outcomes.label(event))
        if isinstance(event, Outcome):
            self._settle(job.request_id, event)
        else:
            job.send(event)

    # --- in the compute thread ----------------------------------------------------------------------------------------

    def _turn(self, event_loop: asyncio.AbstractEventLoop) -> bool:
        """Give the engine new requests and let it take one step; return whether it has more to do."""
        started = time.perf_counter()
        events: list[SampleEvent] = []
        fresh: list[SampleJob] = []
        while self._orders:
            orders = self._orders.popleft()
            fresh += orders.fresh
            events += self._obey(orders)
        try:
            for event in self._sampler.step():
                if event.request_id in self._running:
                    events.append(self._result(event))
            self._versions.drop_unused(time.monotonic(), memory_is_short=self._guard.is_short)
            busy = self._sampler.busy
        except Exception as error:  # an edge of the service: all running requests fail, so that no client waits on
            if not self._running:  # otherwise the error is logged with the requests that fail
                logger.exception("the sampler failed")
            for job in list(self._running.values()):
                self._stop(job.request_id)
                events.append(SampleEvent(job, job.failed(error)))
            busy = False  # the next turn comes with the next request
        if fresh or events:
            self._encoding.submit(self._deliver, event_loop, fresh, events)
        self.busy_seconds += time.perf_counter() - started
        return busy

    def _obey(self, orders: _Orders) -> list[SampleEvent]:
        """Cancel, release and begin what the orders name; return the events of requests that the engine refuses."""
        for request_id in orders.cancelled:
            if request_id in self._running:
                self._stop(request_id)
        for version_id in orders.released:
            self._versions.release(version_id)
        refused = ((job, self._admit(job)) for job in orders.fresh)
        return [SampleEvent(job, job.failed(error)) for job, error in refused if error is not None]

    def _admit(self, job: SampleJob) -> Exception | None:
        """Give a request to the engine; return the error if its version cannot be loaded or the engine refuses it."""
        try:
            self._versions.pin(job.session, time.monotonic())
            try:
                self._sampler.submit(replace(job.request, scope=job.session.tenant_id))
            except Exception:
                self._versions.unpin(job.session, time.monotonic())
                raise
        except Exception as error:  # noqa: BLE001 - an edge of the service: an error fails its own request alone
            return error
        self._running[job.request_id] = job
        self._recorder.started(job.request_id)
        return None

    def _stop(self, request_id: str) -> None:
        """Cancel a request in the engine. Later events of a request that the engine cannot cancel are ignored."""
        job = self._running.pop(request_id)
        self._versions.unpin(job.session, time.monotonic())
        try:
            self._sampler.cancel(request_id)
        except Exception:  # an edge of the service: other requests continue
            logger.exception("request %s could not be cancelled", request_id)

    def _result(self, event: Finished | Progress) -> SampleEvent:
        job = self._running[event.request_id]
        if isinstance(event, Progress):
            self._recorder.progressed(event.request_id)
            return SampleEvent(job, event)
        del self._running[event.request_id]
        self._versions.unpin(job.session, time.monotonic())
        if isinstance(event.outcome, SampleFailure):
            return SampleEvent(job, job.failed(self._versions.shown(job.session, event.outcome.error)))
        sampled = sum(len(sequence.tokens) for sequence in event.outcome.sequences)
        self.tokens_sampled += sampled
        self._recorder.sampled(job.request, event.outcome)
        return SampleEvent(job, event.outcome, sampled)

    # --- in the thread that encodes results ---------------------------------------------------------------------------

    def _deliver(
        self, event_loop: asyncio.AbstractEventLoop, fresh: Sequence[SampleJob], events: Sequence[SampleEvent]
    ) -> None:
        """Encode the results of one turn, and hand its events over to the event loop."""
        encoded = [_encoded(event) for event in events]

        def hand_over() -> None:
            self._begun(fresh)
            for event in encoded:
                self._hand_over(event)
            self._wake.set()  # the engine may have room for more

        event_loop.call_soon_threadsafe(hand_over)


def _encoded(event: SampleEvent) -> SampleEvent:
    """Return the event with an encoded result, if it is a result that goes to a future."""
    job, result = event.job, event.result
    if not isinstance(result, SampleResult) or isinstance(job.into, asyncio.Queue):
        return event
    try:
        return replace(event, result=job.into(result))
    except Exception as error:  # noqa: BLE001 - an edge: a result that cannot be encoded fails its own request alone
        return SampleEvent(job, job.failed(error))


def _result_bytes(request: SampleRequest) -> int:
    """Return the bytes of the prompt's log-probabilities and of their tables that the request asks for.

    The samples are not included, because their length is not known yet; they count as results when they are done.
    """
    targets = 0 if request.target_prompt_logprobs is None else request.target_prompt_logprobs.size
    tables = len(request.prompt) * (request.topk_prompt_logprobs + request.prompt_alt_tokens)
    return 8 * (tables + targets + len(request.prompt))
