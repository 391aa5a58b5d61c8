"""The sampler service: samples of one base model and of its tenants' published versions.

Requests wait here until the engine has room and the compute thread a turn for them; tenants take turns. Samples are not
journalled: they change nothing, and a client that asks for one lost in a restart is told so and sends it again. Samples
of clients that vanished are cancelled and end in the same way.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial

from twinkle.errors import GoneError, InvalidInputError, ShuttingDownError, TwinkleError
from twinkle.sampler.types import Finished, Progress, SampleFailure, Sampler, SampleRequest, SampleResult
from twinkle.sampler.validation import MAX_CELLS
from twinkle.server.backends.compute_thread import Compute, Lane
from twinkle.server.ids import RequestId
from twinkle.server.scheduling.fair_queue import FairQueue
from twinkle.server.services.futures import Delivery, Futures
from twinkle.server.services.sampling.completions import Completions
from twinkle.server.services.sampling.jobs import EventQueue, SampleAdmission, SampleEvent, SampleJob, price_of
from twinkle.server.services.sampling.versions import SamplerVersions
from twinkle.server.services.service_loop import ServiceLoop
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.telemetry.logs import note_request_id
from twinkle.server.telemetry.metrics import Reading
from twinkle.server.telemetry.readings import queue_readings
from twinkle.server.telemetry.recording import Outcomes, SamplingRecorder
from twinkle.server.tenancy.memory import ProcessMemory
from twinkle.server.tenancy.rate_limit import RecentRate
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import Outcome, SamplingSessionRecord, Tally
from twinkle.server.wire.sampling import Encode, encode_sample_result

logger = logging.getLogger(__name__)

# The tables of one request: one that asks for more is refused by the engine's own check of it.
_MOST_RESULT_BYTES = 16 * MAX_CELLS


class SamplerService:
    """Belongs to one event loop; the part below the last heading runs in the compute thread."""

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
        engine_samples: int = 256,
        completion_streams: bool = True,
        recorder: SamplingRecorder | None = None,
    ) -> None:
        """context: what an unlimited sample may grow to.

        max_versions, idle_version_seconds: versions beyond are dropped; they come back from disk when asked for.
        engine_samples: as many are handed to the engine at a time; with more, who came first would keep others out. For
        the same reason a tenant gets three quarters of them at most.
        completion_streams: whether clients may ask for all that is done in one poll.
        """
        self._sampler = sampler
        self._compute = compute
        self._recorder = recorder or SamplingRecorder("sampler")
        memory = memory or ProcessMemory()
        self._guard = memory.guard
        self._guard.relieve_with(self._drop_versions_soon)
        self._futures = futures or Futures(memory=memory.results)
        self.completions = Completions() if completion_streams else None
        tenants = tenants or Tenants()
        self.admission = SampleAdmission(tenants, self._futures, engine_samples)
        self._context = context
        self._jobs: dict[str, SampleJob] = {}  # all that are not done
        self._asked: dict[str, float] = {}  # when each sampling session was last asked about: monotonic seconds
        self._asking = Tally()  # long polls that wait now, by sampling session
        self._numbers: dict[tuple[str, int], set[int]] = {}  # their sequence numbers, by sampling session and client
        self._queue: FairQueue[SampleJob] = FairQueue(tenants.share)  # those that the engine was not given yet
        self._cancelled: list[str] = []
        self._released_versions: list[str] = []
        self._wake = asyncio.Event()
        self._turn_due = False
        self._busy = False
        self.loop = ServiceLoop("sampling")
        self._closed = False
        self._stopping = False
        self.tokens_sampled = 0
        self.busy_seconds = 0.0
        self._rate = RecentRate(time.time())
        # Of the compute thread:
        self._running: dict[str, SampleJob] = {}
        self._versions = SamplerVersions(sampler, files, most=max_versions, idle_seconds=idle_version_seconds)

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
    ) -> None:
        """Take in a request whose future is awaited with :meth:`wait`; the same again is the same request."""
        known = self._futures.digest(request.request_id)
        if known is None:
            self._accept(request, session, encode)
            self._asked[session.sampling_session_id] = time.monotonic()
            self._futures.promise(request.request_id, session.tenant_id, digest)
        elif known != digest:
            number = RequestId.parse(request.request_id).number
            raise InvalidInputError("seq_id", number, "a number that no other request of this sampler has used")

    async def generate(
        self, session: SamplingSessionRecord, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[tuple[int, Progress | SampleResult], None]:
        """Sample the prompts of one HTTP request together; yield events with the place of their request.

        A request has progress if its ``stream`` is set, and its result last. The first error of any of them is raised
        as a TwinkleError. A caller that leaves before the end cancels all of them.
        """
        if self._closed:
            raise ShuttingDownError
        events: EventQueue = asyncio.Queue()
        jobs: dict[str, SampleJob] = {}
        try:
            for request in requests:
                jobs[request.request_id] = self._accept(request, session, events)
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

    async def results(self, session: SamplingSessionRecord, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Return the results of requests that are sampled together, none of which may be streamed, in their order."""
        async with aclosing(self.generate(session, requests)) as events:
            results = {place: event async for place, event in events if isinstance(event, SampleResult)}
        return [results[place] for place in range(len(requests))]

    async def wait(self, request: RequestId, timeout: float) -> Outcome | None:
        request_id = str(request)
        note_request_id(request_id)
        if request_id not in self._futures:
            raise GoneError(
                f"sample {request_id} was lost in a restart, was cancelled because nobody asked for it, or is too old: "
                "send it again"
            )
        with self.being_asked(request.owner):
            return await self._futures.wait(request_id, timeout)

    @contextmanager
    def delivering(self, request_id: str) -> Iterator[Delivery]:
        """Enter this while a result is written to a client; the delivery notes whether that was completed."""
        with self._futures.delivering(request_id, time.time()) as delivery:
            yield delivery
        self._wake.set()  # its tenant may have room for results again

    def cancel(self, request_id: str) -> None:
        """Stop the work on a sample. One that is done stays as it is."""
        job = self._jobs.get(request_id)
        if job is not None and not job.streamed:
            self._withdraw(job)
            self._settle(request_id, Outcome.failure("cancelled by its client", "user"))

    @contextmanager
    def being_asked(self, sampling_session_id: str) -> Iterator[None]:
        """Enter this while a client of the sampling session waits for a sample: its samples are wanted."""
        with self._asking.counting(sampling_session_id):
            try:
                yield
            finally:
                self._asked[sampling_session_id] = time.monotonic()

    def unasked_sessions(self, seconds: float) -> set[str]:
        """Return the sessions with samples under way for which no poll came in so many seconds."""
        return {job.session.session_id for job in self._unasked(seconds)}

    def cancel_unasked(self, session_id: str, seconds: float) -> int:
        """Stop the work on samples of a session for which no poll came in so many seconds; return how many.

        They are forgotten, not failed: a client that comes back for one is told to send it again, which SDKs do.
        """
        cancelled = [job for job in self._unasked(seconds) if job.session.session_id == session_id]
        for job in cancelled:
            self._withdraw(job)
            self._futures.forget(job.request_id)
            if self.completions is not None:
                self.completions.add(job.request_id, None, time.time())
        return len(cancelled)

    def _unasked(self, seconds: float) -> list[SampleJob]:
        """Return jobs for which no poll came; requests that are answered in their own connection end with it."""
        before = time.monotonic() - seconds
        waiting = (job for job in self._jobs.values() if not job.streamed)
        named = ((job, job.session.sampling_session_id) for job in waiting)
        return [job for job, name in named if name not in self._asking and self._asked.get(name, 0.0) < before]

    def release_version(self, version_id: str) -> None:
        """Drop a version whose sampling sessions have ended, as soon as no request uses it."""
        self._released_versions.append(version_id)
        self._wake.set()

    # --- completions --------------------------------------------------------------------------------------------------

    def acknowledge(self, sampling_session_id: str, request_ids: Sequence[str]) -> None:
        """Note that the client has these results."""
        for request_id in request_ids:
            request = RequestId.parse_or_none(request_id)
            if request is not None and request.owner == sampling_session_id:
                self._futures.acknowledge(request_id)
        self._wake.set()  # their tenant may have room for results again

    def report_lost(self, sampling_session_id: str, numbers: range) -> None:
        """Tell the client that samples which are unknown here are done: asking for one, it hears to send it again."""
        assert self.completions is not None, "only a client with a stream can be told"
        now = time.time()
        for number in numbers:
            request_id = str(RequestId(sampling_session_id, number))
            if request_id not in self._futures:
                self.completions.add(request_id, None, now)

    def lowest_number(self, sampling_session_id: str, seq_id: int) -> int:
        """Return the lowest number that the client which now uses ``seq_id`` may be waiting for.

        A sample that is done counts until the client was told: the next server could not tell it.
        """
        client = RequestId(sampling_session_id, seq_id).client
        untold = () if self.completions is None else self.completions.numbers(*client)
        return min([seq_id, *self._numbers.get(client, ()), *untold])

    # --- maintenance --------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        self._futures.sweep(now)
        self._futures.take_delivered()
        if self.completions is not None:
            self.completions.sweep(now, self._futures.delivered)
        self._rate.note(self.tokens_sampled, now)
        under_way = {job.session.sampling_session_id for job in self._jobs.values()}
        self._asked = {name: at for name, at in self._asked.items() if name in under_way}
        self._turn_due = True  # versions are published and grow old also when nobody samples
        self._wake.set()

    def _drop_versions_soon(self) -> int:
        """Have the next turn drop versions that no request uses; nothing has left memory before that."""
        self._turn_due = True
        self._wake.set()
        return 0

    def release_waiters(self) -> None:
        """Answer all that wait, now and from now on: long polls, and readers of events."""
        self._futures.close()
        if self.completions is not None:
            self.completions.close()
        self._closed = True
        for job in list(self._jobs.values()):
            if job.streamed:
                self._withdraw(job)
                job.send(ShuttingDownError())

    def readings(self, model: str) -> Iterator[Reading]:
        """Yield the metrics that are read when somebody asks."""
        polls = self._futures.polls + (0 if self.completions is None else self.completions.polls)
        unfetched, waiting = self._futures.all_unfetched_bytes, len(self._jobs)
        return queue_readings(model, "sampling", waiting, polls, unfetched, self.busy_seconds)

    def status(self) -> dict[str, object]:
        return {
            "waiting_samples": len(self._jobs),
            "sampled_tokens": self.tokens_sampled,
            "sampling_tokens_per_second": self._rate.rate(self.tokens_sampled, time.time()),
            "sampling_seconds": round(self.busy_seconds, 3),
        }

    # --- the service loop ---------------------------------------------------------------------------------------------

    def _accept(self, request: SampleRequest, session: SamplingSessionRecord, into: Encode | EventQueue) -> SampleJob:
        if request.request_id in self._jobs:
            raise InvalidInputError("request_id", request.request_id, "an id that no request under way has")
        self._guard.check(min(_result_bytes(request), _MOST_RESULT_BYTES))
        job = self.admission.enter(SampleJob(request, session, into, price_of(request, self._context)))
        self._jobs[job.request_id] = job
        if job.numbered is not None:
            self._numbers.setdefault(job.numbered.client, set()).add(job.numbered.number)
        self._recorder.accepted(job.request)
        self._queue.push(job.tenant_id, job.request_id, job, job.price.cost)
        self._wake.set()
        return job

    def _withdraw(self, job: SampleJob) -> None:
        """Forget a request that is not done, here and in the engine. What the engine began with stays charged."""
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
        del self._jobs[job.request_id]
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
        while not self._stopping:
            due = self._cancelled or self._released_versions or self._turn_due
            if not (self._busy or due or self._queue.has_item(self.admission.may_start)):
                await self._wake.wait()
            self._wake.clear()
            events, self._busy = await self._compute.run(self._next_turn(), Lane.SAMPLING)
            for event in events:
                self._hand_over(event)

    def _next_turn(self) -> Callable[[], tuple[list[SampleEvent], bool]]:
        """Return the next turn of the compute thread, with what it is to cancel, to release and to start."""
        fresh = []
        while (job := self._queue.pop(self.admission.may_start)) is not None:
            self.admission.start(job)
            fresh.append(job)
        turn = partial(self._turn, self._cancelled, self._released_versions, fresh)
        self._cancelled, self._released_versions, self._turn_due = [], [], False
        return turn

    def _hand_over(self, event: SampleEvent) -> None:
        job, result = event.job, event.result
        if self._jobs.get(job.request_id) is not job:
            return  # withdrawn meanwhile
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

    def _turn(
        self, cancelled: Sequence[str], released: Sequence[str], fresh: Sequence[SampleJob]
    ) -> tuple[list[SampleEvent], bool]:
        """Give the engine new requests and let it work; return what came of it and whether there is more to do.

        ``released``: versions that no session will ask for again.
        """
        started = time.perf_counter()
        events: list[SampleEvent] = []
        for request_id in cancelled:
            if request_id in self._running:
                self._stop(request_id)
        for version_id in released:
            self._versions.release(version_id)
        for job in fresh:
            error = self._admit(job)
            if error is not None:
                events.append(SampleEvent(job, job.failed(error)))
        try:
            for event in self._sampler.step():
                if event.request_id in self._running:
                    events.append(self._result(event))
            self._versions.drop_unused(time.monotonic(), memory_is_short=self._guard.is_short)
            busy = self._sampler.busy
        except Exception as error:  # the sampler loop is an edge; nobody may wait for ever
            if not self._running:  # nobody else hears of it
                logger.exception("the sampler failed")
            for job in list(self._running.values()):
                self._stop(job.request_id)
                events.append(SampleEvent(job, job.failed(error)))
            busy = False  # it is asked again when there is something new to do
        self.busy_seconds += time.perf_counter() - started
        return events, busy

    def _admit(self, job: SampleJob) -> Exception | None:
        """Give a request to the engine; return the error if it was not taken."""
        try:
            self._versions.pin(job.session, time.monotonic())
            try:
                self._sampler.submit(replace(job.request, scope=job.session.tenant_id))
            except Exception:
                self._versions.unpin(job.session, time.monotonic())
                raise
        except Exception as error:  # noqa: BLE001 - the sampler loop is an edge: it fails its own request alone
            return error
        self._running[job.request_id] = job
        self._recorder.started(job.request_id)
        return None

    def _stop(self, request_id: str) -> None:
        """Stop a request. The sampler may go on with what it cannot cancel; its events are ignored."""
        job = self._running.pop(request_id)
        self._versions.unpin(job.session, time.monotonic())
        try:
            self._sampler.cancel(request_id)
        except Exception:  # the sampler loop is an edge
            logger.exception("request %s could not be cancelled", request_id)

    def _result(self, event: Finished | Progress) -> SampleEvent:
        job = self._running[event.request_id]
        if isinstance(event, Progress):
            self._recorder.progressed(event.request_id)
            return SampleEvent(job, event)
        del self._running[event.request_id]
        self._versions.unpin(job.session, time.monotonic())
        if isinstance(event.outcome, SampleFailure):
            return SampleEvent(job, job.failed(event.outcome.error))
        sampled = sum(len(sequence.tokens) for sequence in event.outcome.sequences)
        self.tokens_sampled += sampled
        self._recorder.sampled(job.request, event.outcome)
        if isinstance(job.into, asyncio.Queue):
            return SampleEvent(job, event.outcome, sampled)
        try:
            return SampleEvent(job, job.into(event.outcome), sampled)
        except Exception as error:  # noqa: BLE001 - a result that cannot be encoded fails its own request alone
            return SampleEvent(job, job.failed(error))


def _result_bytes(request: SampleRequest) -> int:
    """Return how many bytes the tables that the request asks for will have, as far as it alone decides that.

    How long its samples will be is not known; they count as results once they are there.
    """
    targets = 0 if request.target_prompt_logprobs is None else request.target_prompt_logprobs.size
    tables = len(request.prompt) * (request.topk_prompt_logprobs + request.prompt_alt_tokens)
    return 8 * (tables + targets + len(request.prompt))
