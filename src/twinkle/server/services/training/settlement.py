"""How an op ends: its client is told, then its outcome is written down."""

import asyncio
import logging
import time
from collections.abc import Callable

from twinkle.server.backends.compute_thread import event_loop
from twinkle.server.services.futures import Futures
from twinkle.server.services.service_loop import BackgroundTasks
from twinkle.server.services.training.adapters import LiveAdapter
from twinkle.server.services.training.journal_quota import JournalQuota
from twinkle.server.services.training.snapshots import Snapshots
from twinkle.server.state.errors import DatabaseUnavailableError, StorageFullError
from twinkle.server.state.store import Store
from twinkle.server.telemetry.recording import TrainingRecorder
from twinkle.server.types import Op, OpKind, Outcome
from twinkle.server.usage import Usage

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0


class Settlement:
    """Ends the ops of one model service. Belongs to the event loop."""

    def __init__(
        self,
        store: Store,
        futures: Futures,
        usage: Usage,
        recorder: TrainingRecorder,
        snapshots: Snapshots,
        journal: JournalQuota,
        background: BackgroundTasks,
    ) -> None:
        self.stopping = False
        self.on_settled: Callable[[Op], None] = lambda _op: None
        self._store = store
        self._futures = futures
        self._usage = usage
        self._recorder = recorder
        self._snapshots = snapshots
        self._journal = journal
        self._background = background

    @event_loop
    def settle(self, adapter: LiveAdapter, op: Op, outcome: Outcome) -> None:
        """Settle the op's future at once, and write the outcome down behind that.

        If the process dies in between, the op is computed again. An op that had ended before a restart and was only
        done again changes nothing that its client has seen.
        """
        adapter.ops.pop(op.seq, None)
        adapter.used_at = time.monotonic()
        replay = adapter.replays.pop(op.seq, None)
        repeated = replay is not None and replay.ended
        self._recorder.settled(op, outcome, repeated=repeated)
        self.on_settled(op)
        if replay is not None and repeated:
            if outcome.failed and not replay.record.failed:
                logger.error("replay of %s failed, though it had succeeded before", op.request_id)
        else:
            self._background.start(self._record(adapter, op, outcome))
            if not outcome.failed:
                tenant_id, steps = adapter.run.tenant_id, int(op.is_step)
                self._usage.add(tenant_id, trained_tokens=op.tokens, optim_steps=steps, requests=1)
            self._futures.settle(op.request_id, outcome, time.time())
        adapter.op_ended.set()
        # A forward pass that leaves nothing behind changes nothing: its number is covered by the snapshot there is.
        changed = op.kind is not OpKind.FORWARD or adapter.kind.passes_leave_state
        self._snapshots.note(op.adapter_id, time.monotonic(), changed=changed)

    async def _record(self, adapter: LiveAdapter, op: Op, outcome: Outcome) -> None:
        """Write an outcome down, however long the disk is full or the database cannot be reached."""
        while True:
            try:
                await self._store.ops.record_outcomes([(op.adapter_id, op.seq, outcome)], time.time())
                adapter.unrecorded.discard(op.seq)
                self._futures.recorded(op.request_id)
                self._journal.add(adapter.run.tenant_id, len(outcome.body))
                return
            except (StorageFullError, DatabaseUnavailableError) as error:
                adapter.unrecorded.add(op.seq)
                logger.error("outcome of %s is not on record: %s", op.request_id, error)
                if self.stopping:
                    return
                await asyncio.sleep(_RETRY_SECONDS)
