"""The training service of one base model: accepts ops for its adapters and runs them in shared batches.

The life of an op: ``submit`` writes it to the journal and hands it to the ``runner.OpRunner``; ``wait`` waits for its
outcome. If the process dies in between, the ``start`` of the next process restores each adapter's last snapshot and
replays the ops behind it in order. Clients find the same futures under the same ids.
"""

import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace

from twinkle.errors import NotFoundError, UnsupportedError
from twinkle.model.types import FullSpec
from twinkle.server.ids import RequestId
from twinkle.server.services.checkpoints.save_and_load import Checkpoints
from twinkle.server.services.futures import Delivery
from twinkle.server.services.images import RequestImages
from twinkle.server.services.training.adapters import LiveAdapter, LiveAdapters, Place
from twinkle.server.services.training.admission import Entry, JournalQuota, OpAdmission
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.custom_losses import LossGraphs
from twinkle.server.services.training.recovery import journalled, plan_recovery
from twinkle.server.services.training.replay_feed import ReplayFeed
from twinkle.server.services.training.runner import OpRunner, Settlement
from twinkle.server.services.training.snapshots import Snapshots
from twinkle.server.state.errors import DamagedRecordError, JournalError, ReplicaHeldError
from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.logs import note_request_id
from twinkle.server.telemetry.metrics import Reading
from twinkle.server.telemetry.readings import image_readings, queue_readings, trainer_readings
from twinkle.server.tenancy.memory import ProcessMemory
from twinkle.server.tenancy.rate_limit import RecentRate
from twinkle.server.types import NUMBERED_HERE, UNNUMBERED, Budget, Ending, Op, Outcome, Refused, RunRecord
from twinkle.server.wire.errors import SequenceConflictError

logger = logging.getLogger(__name__)

# A sequence number further beyond the last one than this is refused as a mistake. A call with many chunks uses dozens.
_FURTHEST_AHEAD = 10_000


class ModelService:
    """Accepts the ops of one base model's adapters, has them run and keeps their futures. Belongs to the event loop."""

    def __init__(
        self, context: TrainingContext, memory: ProcessMemory, is_ours: Callable[[RunRecord], bool] = lambda _run: True
    ) -> None:
        """``memory``: the budgets that all services of this process share.

        ``is_ours``: whether a run of this model is recovered by this process. On Ray each replica has its own runs.
        """
        self.context = context  # public: callers that need one of its parts, such as the store, use the part directly
        self._store, self._scheduler = context.store, context.scheduler
        self._futures = context.futures
        self._futures.read_back = self._on_record
        self._guard = memory.guard
        self._is_ours = is_ours
        self.journal = JournalQuota(context.store, context.tenants)
        snapshots, checkpoints = Snapshots(context), Checkpoints(context)
        settlement = Settlement(context, snapshots, self.journal)
        self._settle = settlement.settle
        self.adapters = LiveAdapters(context, snapshots, checkpoints, settlement.settle, memory.adapter_bytes)
        self._runner = OpRunner(context, self.adapters, settlement, snapshots, checkpoints)
        self.loop = self._runner.loop
        self._loss_graphs = LossGraphs(context.store, context.tenants.pools.reading)
        self._images = RequestImages(context.model, context.tenants.pools.images)
        self._feed = ReplayFeed(context, self._loss_graphs, self._images, self.adapters, self._runner.enqueue)
        settlement.on_settled = self._feed.ended
        self._admission = OpAdmission(context, self.adapters, memory.queued_bytes)
        self._refusals = itertools.count()
        self._rate = RecentRate(time.time())

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover the live runs of this model that belong to this process, and start the service loop.

        A run that cannot be recovered because of damage on disk is marked as failed.
        """
        for run in await self._store.runs.in_state("live"):
            if run.model_name == self.context.model.name and self._is_ours(run) and self._can_go_on(run):
                try:
                    await self._recover(run)
                except DamagedRecordError as error:  # damage fails this run alone
                    await self._leave_out(run, str(error))
                except JournalError as error:  # its text names server directories, which clients must not see
                    logger.error("damaged: run %s: %s", run.run_id, error)
                    await self._leave_out(run, "its journal on the server's disk is damaged")
        left = (replay.without_body() for adapter in self.adapters for replay in adapter.replays.values())
        self.context.running.keep_only([op.request_id for op in left])
        await self._free_journal()
        self._runner.start()
        self.context.background.start(self._feed.run())

    def _can_go_on(self, run: RunRecord) -> bool:
        """Return whether a live run is recovered here. One that is not stays live in the database, as it is on disk."""
        if not self._is_of_mode(run):
            mode = self.context.model.train_mode
            logger.warning("%s is not recovered while its model is served with train_mode: %s", run.run_id, mode)
            return False
        if isinstance(run.spec, FullSpec) and self.adapters.holder is not None:  # there were more replicas before
            logger.error("%s is not recovered: no replica is free for it; start the server with more", run.run_id)
            return False
        return True

    async def stop(self) -> None:
        """Finish the running batch, end the service loop, and bring snapshots up to date where that is possible.

        They are left as they are if the loop has failed, or while the state of an adapter is incomplete.
        """
        self.adapters.stopping = True
        self._feed.stop()
        await self._runner.stop()

    async def _free_journal(self) -> None:
        """Delete journal files that are no longer needed, such as those of earlier versions, and measure the rest."""
        pruned = await self._store.ops.delete_segments()
        if pruned.freed_bytes:
            files = pruned.body_segments + pruned.outcome_segments
            logger.info("deleted %d unneeded files of the journal: freed %.1f MB", files, pruned.freed_bytes / 1e6)
        await self.journal.measure()

    async def _leave_out(self, run: RunRecord, what: str) -> None:
        """Mark a run as failed, because damage on disk prevents its recovery."""
        note = await self._store.damage.fail_run(run.run_id, run.tenant_id, what)
        logger.error("damaged: run %s (tenant %s): %s", run.run_id, run.tenant_id, note)
        self.adapters.drop(run.run_id)
        await self._store.runs.set_state(run.run_id, "failed", note)

    async def _recover(self, run: RunRecord) -> None:
        """Add the adapter of a run, promise the futures of its unfinished ops, and line up its replays."""
        plan = await plan_recovery(self._store, self.context.files, run)
        adapter = self.adapters.add(run, plan)
        last = await self._store.ops.get(run.run_id, plan.last) if plan.last else None
        if last is not None:
            adapter.numbered_here = last.digest == NUMBERED_HERE
        for replay in plan.replays:
            if not replay.ended:
                self._futures.promise(replay.without_body().request_id, run.tenant_id)
        self._feed.add(adapter)
        if plan.replays:
            logger.info("replaying %d ops of %s from %d", len(plan.replays), run.run_id, plan.next_seq)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def create(self, run: RunRecord, op: Op) -> str:
        """Accept the op that creates a run, and return the id of its future.

        A client that did not get the answer sends the same request again; it gets the same future. If the run's id was
        used by another request, or the run was evicted long ago, the id is that of a future that has already failed.
        ReplicaHeldError: the run is to train all parameters, and another run holds this replica.
        """
        if run.run_id not in self.adapters:
            size = await self.adapters.memory.size_of(run.spec)
            if isinstance(run.spec, FullSpec):
                self._check_free(run, size)
            self.adapters.memory.check()
            self._guard.check(op.price.held_bytes + self.adapters.memory.growth(size))
        with self.context.recorder.journalling(op):
            limits = self.context.tenants.limits(run.tenant_id)
            accepted = await self._store.ops.accept_run(
                run, op, op.digest, time.time(), limits.max_adapters_per_tenant, limits.max_session_rows_per_tenant
            )
        # Without a record in the journal the run was created long ago, and its request can no longer be compared.
        if accepted.record is not None and accepted.record.digest != op.digest:
            used = self.context.kinds.find(run.run_id).used_before(run)
            return self.refuse(run, f"{used} before with another request")
        if accepted.record is None and accepted.run.state == "parked":
            return self.refuse(run, f"model_seq_id {run.number} is in use: {accepted.run.note}")
        if accepted.record is None and accepted.run.state == "failed":
            return self.refuse(run, accepted.run.note or f"model {run.run_id} could not be created")
        if accepted.created:
            self._runner.enqueue(self.adapters.add(run), op)
        return op.request_id

    def _check_free(self, run: RunRecord, needed: int) -> None:
        """Raise an error if another run holds this replica, or if training all parameters does not fit into memory."""
        holder = self.adapters.holder
        if holder is not None and holder.run_id != run.run_id:
            raise ReplicaHeldError(holder)
        free = max(0, self._guard.free)
        if holder is None and needed > free:
            raise UnsupportedError(
                f"training all parameters of {run.base_model} needs {needed} bytes of the server's memory beside the "
                f"model, and {free} bytes are free"
            )

    def absence(self, run: RunRecord) -> str:
        """Return why a run is not among the live adapters, for the error of a request about it."""
        if run.state == "live" and not self._is_of_mode(run):
            now = self.context.model.train_mode
            return f"model {run.run_id} cannot go on while {run.base_model} is served with train_mode: {now}"
        return run.note or f"model {run.run_id} is not live any more"

    def _is_of_mode(self, run: RunRecord) -> bool:
        """Return whether the model's trainer can have the run: an adapter, or with train_mode: full all parameters."""
        return isinstance(run.spec, FullSpec) is (self.context.model.train_mode == "full")

    async def submit(self, op: Op) -> str:
        """Accept an op: write it to the journal, and return the id of its future.

        If its number is too high, came too late or was used by another request, the op is not accepted, and the id is
        that of a future that has already failed. If a limit leaves no room for it, an error is raised.
        """
        adapter = self._adapter(op.adapter_id)
        if adapter.refusing is not None and await self._store.ops.get(op.adapter_id, op.seq) is None:
            return self.refuse(adapter.run, adapter.refusing)
        limits = self.context.tenants.limits(adapter.run.tenant_id)
        if op.waits_for_images:  # first: image tokens are a part of the price
            known = await self._store.ops.get(op.adapter_id, op.seq)
            if known is not None:  # it was sent again, and its images are not read again
                return op.request_id if known.digest == op.digest else self.refuse(adapter.run, _conflict(op))
            op = await self._images.place(op, adapter.run.tenant_id, limits)
        if op.kind.adds_memory and op.seq not in adapter.ops:
            self._guard.check(op.price.held_bytes, urgent=op.seq == self._scheduler.next_seq(op.adapter_id))
        if op.custom_loss is not None:
            op = await self._loss_graphs.resolved(op, adapter.run)  # before admission: the loss is a part of the price
        if self.adapters.get(op.adapter_id) is not adapter:  # the run was evicted while images and loss were looked up
            raise NotFoundError("model", op.adapter_id)
        with self._admission.entering(adapter, op) as entry:
            return await self._submit(adapter, op, entry)

    async def submit_unnumbered(self, op: Op) -> str:
        """Accept an op whose client sent no sequence number: it comes after all ops of its model that have arrived."""
        async with self.next_number(op.adapter_id) as number:
            return await self.submit(replace(op, seq=number, sent_digest=NUMBERED_HERE))

    def numbering_conflict(self, op: Op) -> str | None:
        """Return why an op with a number is refused if earlier ops of its model had none, or the reverse; else None.

        If both were allowed, the server could give an op the number that a client uses next for its own op, and one of
        the two would be refused in the middle of a window.
        """
        adapter, unnumbered = self._adapter(op.adapter_id), op.seq == UNNUMBERED
        if adapter.numbered_here is None or adapter.numbered_here is unnumbered:
            return None
        if unnumbered:
            last = f"those of {op.adapter_id} have numbers, the last is {adapter.highest_seq}"
            return f"seq_id: got none, allowed: a number in all requests of a model or in none; {last}"
        return (
            f"seq_id: got {op.seq}, allowed: a number in all requests of a model or in none; those of {op.adapter_id}"
            " have none"
        )

    async def _submit(self, adapter: LiveAdapter, op: Op, entry: Entry) -> str:
        if op.seq > adapter.highest_seq + _FURTHEST_AHEAD:
            allowed = f"at most {_FURTHEST_AHEAD} beyond the last one, {adapter.highest_seq}"
            return self.refuse(adapter.run, f"seq_id: got {op.seq}, allowed: {allowed}")
        if await self._comes_too_late(op):
            return self.refuse(adapter.run, f"seq_id {op.seq} came too late: {op.adapter_id} has gone on without it")
        if op.waits_for_images and op.seq not in adapter.ops:  # otherwise it was sent again, and is not computed again
            limits = self.context.tenants.limits(adapter.run.tenant_id)
            op = await self._images.decode(op, adapter.run.tenant_id, limits)
        if isinstance(op.payload, Refused):
            op = journalled(op, op.payload)
        tenant_id = adapter.run.tenant_id
        self.journal.check(tenant_id, len(op.body), urgent=bool(adapter.ops))
        with self.context.recorder.journalling(op):
            accepted = await self._store.ops.accept(op, op.digest, time.time())
        if accepted.record.digest != op.digest:
            return self.refuse(adapter.run, _conflict(op))
        if accepted.created:
            entry.taken = True
            adapter.numbered_here = op.digest == NUMBERED_HERE
            self.journal.add(tenant_id, len(op.body))
            adapter.last_request_at = time.time()
            self._futures.promise(op.request_id, adapter.run.tenant_id)
            message = (
                self._runner.enqueue(adapter, op) if op.adapter_id in self.adapters else "the model was just removed"
            )
            if message is not None:
                refusal = Outcome.failure(message, "user", Ending.REFUSED)
                self._settle(adapter, op, refusal)
        return op.request_id

    # --- for clients that leave sequence numbers and the encoding of rows to the server -------------------------------

    async def was_accepted(self, run_id: str, seq: int, digests: Collection[bytes]) -> bool:
        """Return whether this request was accepted before; SequenceConflictError if another request has its number.

        ``digests``: the digests of the request as this and earlier versions of the server compute them.
        """
        record = await self._store.ops.get(run_id, seq)
        if record is not None and record.digest not in digests:
            raise SequenceConflictError(run_id, seq)
        return record is not None

    def check_room(self, run_id: str) -> None:
        """Raise an error if the limits of this run's tenant leave no room for one more op, however small it is."""
        self._admission.check(self._adapter(run_id).run.tenant_id)

    @asynccontextmanager
    async def next_number(self, run_id: str) -> AsyncIterator[int]:
        """Yield the next free sequence number of a run. Other callers of this method wait until the block ends."""
        adapter = self._adapter(run_id)
        async with adapter.numbering:
            yield max(adapter.highest_seq + 1, self._scheduler.next_seq(run_id))

    @asynccontextmanager
    async def in_trainer(self, run_id: str) -> AsyncIterator[None]:
        """Load an adapter and keep it in the trainer for the duration of the block.

        After a restart this waits until all ops that had ended before are replayed, so that the adapter's state,
        including its template, is what its client has seen.
        """
        adapter = self._adapter(run_id)
        while adapter.repeats and not self.adapters.stopping:
            await adapter.next_end()
        with adapter.in_use():
            if not await self.adapters.load(adapter):
                raise NotFoundError("model", run_id)
            yield

    def _adapter(self, run_id: str) -> LiveAdapter:
        adapter = self.adapters.get(run_id)
        if adapter is None:
            raise NotFoundError("model", run_id)
        return adapter

    async def _comes_too_late(self, op: Op) -> bool:
        """Return whether the op's number was given up as missing. Then the op is not journalled, so that a replay gives
        the number up again.
        """
        if op.seq >= self._scheduler.next_seq(op.adapter_id):
            return False
        return await self._store.ops.get(op.adapter_id, op.seq) is None

    async def wait(self, request: RequestId, run: RunRecord, timeout: float) -> Outcome | None:
        """Return the outcome, or None if there is none after ``timeout`` seconds or when the server shuts down.

        NotFoundError: there is neither a future in memory nor an outcome in the journal. If damage of the run is on
        record, a failure that says so is returned instead. An outcome counts as fetched after a complete
        :meth:`delivering`.
        """
        request_id = str(request)
        note_request_id(request_id)
        if request_id not in self._futures:
            outcome = await self._on_record(request_id)
            if outcome is None:
                damage = await self._store.damage.of_run(run.run_id)
                if damage is None:
                    raise NotFoundError("request", request_id)
                return Outcome.failure(damage.message, "server")
            self._futures.adopt(request_id, run.tenant_id, outcome, time.time())
            return outcome
        return await self._futures.wait(request_id, timeout)

    def delivering(self, request_id: str) -> AbstractContextManager[Delivery]:
        """Keep an outcome in memory while it is written to a client. Its writer sets ``complete`` at the end."""
        return self._futures.delivering(request_id, time.time())

    async def _on_record(self, request_id: str) -> Outcome | None:
        """Return the outcome in the journal, or None. If it is damaged, return a failure that says so."""
        request = RequestId.parse(request_id)
        try:
            return await self._store.ops.outcome(request.owner, request.number)
        except JournalError as error:
            logger.error("damaged: the result of request %s: %s", request, error)
            message = f"request {request}: its result was damaged on the server's disk; send the request again"
            return Outcome.failure(message, "server")

    async def finish_accepted(self, run_id: str) -> None:
        """Wait until all ops that were accepted for a run before this call have ended, or until the server stops."""
        adapter = self.adapters.get(run_id)
        accepted = set() if adapter is None else adapter.unfinished
        while adapter is not None and not accepted.isdisjoint(adapter.unfinished) and not self.adapters.stopping:
            await adapter.next_end()

    async def finish_ready(self, run_id: str, why: str) -> None:
        """Refuse new ops of a run with ``why``, and wait until its accepted ops have ended, or until the server stops.

        Ops behind a gap in the sequence are not waited for, because the missing ones are refused, too.
        """
        adapter = self.adapters.get(run_id)
        if adapter is None:
            return
        adapter.refusing = why
        while run_id in self.adapters and not self.adapters.stopping:
            following = self._scheduler.next_seq(run_id)
            if not adapter.repeats and all(seq > following for seq in adapter.unfinished):
                return
            await adapter.next_end()

    def last_requests(self) -> dict[str, float]:
        """Return the Unix time of each live run's last new op, for the runs that had one after their creation and since
        this process started.
        """
        return {a.run.run_id: a.last_request_at for a in self.adapters if a.last_request_at}

    def sweep(self, now: float) -> list[tuple[str, int]]:
        """Forget outcomes that were kept long enough. Called by maintenance.

        Return (run id, sequence number) of the ops whose outcome was first fetched since the last call.
        """
        self._futures.sweep(now)
        self._rate.record(self._trained_tokens(), now)
        delivered = map(RequestId.parse, self._futures.take_delivered())
        return [(request.owner, request.number) for request in delivered if not request.is_refusal]

    def refuse(self, run: RunRecord, message: str) -> str:
        """Return the id of a new future that has already failed with ``message``.

        The SDK reports a failed future to its user, but retries after an HTTP 409. QuotaError or OverloadedError: there
        are too many unfetched results.
        """
        self._admission.check_results(run.tenant_id)
        request_id = str(RequestId.for_refusal(run.run_id, next(self._refusals)))
        self._futures.promise(request_id, run.tenant_id)
        self._futures.settle(request_id, Outcome.failure(message, "user"), time.time())
        return request_id

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Return the host memory budgets of adapters, queued ops and replayed ops."""
        return self.adapters.memory.budget, self._admission.budget, self._feed.budget()

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics that are computed when /metrics is read. The trainer has some after its first batch."""
        numbers, model, futures = self._scheduler.numbers(), self.context.model.name, self._futures
        waiting, busy = sum(numbers.waiting.values()), self._runner.busy_seconds
        yield from queue_readings(model, "training", waiting, futures.polls, futures.all_unfetched_bytes, busy)
        yield Reading(instruments.COMPUTE_STEP, self.context.compute.step_seconds, (model,))
        yield Reading(instruments.MERGE_RATIO, numbers.merge_ratio, (model,))
        on_disk = sum(adapter.place is Place.DISK for adapter in self.adapters)
        yield Reading(instruments.ADAPTERS, on_disk, (model, "disk"))
        counts = None if self.context.model.images is None else self.context.model.images.counts()
        if counts is not None:
            yield from image_readings(model, *counts)
        if self.context.recorder.trainer_numbers is not None:
            yield from trainer_readings(model, self.context.recorder.trainer_numbers)

    def status(self) -> dict[str, object]:
        numbers = self._scheduler.numbers()
        return {
            "adapters": len(self.adapters),
            "queued_ops": sum(numbers.waiting.values()),
            "ops": numbers.ops,
            "batches": numbers.pass_batches,
            "merge_ratio": round(numbers.merge_ratio, 2),
            "trained_tokens": self._trained_tokens(),
            "training_tokens_per_second": self._rate.rate(self._trained_tokens(), time.time()),
            "training_seconds": round(self._runner.busy_seconds, 6),
            **self._device_memory(),
        }

    def _device_memory(self) -> dict[str, int]:
        """Return the memory of the GPU; nothing on a CPU, and before the first batch, when it is not known yet."""
        numbers = self.context.recorder.trainer_numbers
        if numbers is None or numbers.memory is None:
            return {}
        return {"device_memory_used_bytes": numbers.memory.reserved, "device_memory_bytes": numbers.memory.total}

    def _trained_tokens(self) -> int:
        return self._scheduler.numbers().all_tokens


def _conflict(op: Op) -> str:
    return f"seq_id {op.seq} of model {op.adapter_id} was used before with another request; each request needs its own"
