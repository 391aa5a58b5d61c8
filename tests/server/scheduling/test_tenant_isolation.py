"""A tenant that floods the queue slows others only by its share. Counted in batches and turns, with the mock."""

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.support.servers.model_services import model_service
from tests.support.servers.running import training_body
from twinkle.errors import QuotaError
from twinkle.model.types import AdamParams, LoraSpec
from twinkle.server import ids
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.backends.mock import MockTrainer, mock_model
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.scheduling.shares import Priority, TenantShare
from twinkle.server.services.training.adapters import LiveAdapter
from twinkle.server.services.training.model_service import ModelService
from twinkle.server.state.store import Store
from twinkle.server.tenancy.tenants import Tenants, TenantTerms
from twinkle.server.types import CreateAdapter, Op, OpKind, OptimStep, Outcome, RunRecord, SessionRecord
from twinkle.server.wire.training import Allowance, decode_forward_backward

BUDGET = 64  # tokens; a batch has room for a dozen passes
STEPS = 15


@dataclass
class Counted:
    """A service that counts its batches, and the count when each op was accepted and when it ended."""

    service: ModelService
    store: Store
    batches: int = 0
    placed: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)

    def watch(self) -> None:
        runner, settlement = self.service._runner, self.service._runner._settlement
        execute, enqueue, settle = runner._execute, runner.enqueue, settlement.settle

        def counting_execute(ops: Sequence[Op], noted: Future[None]) -> list[Outcome]:
            self.batches += 1
            return execute(ops, noted)

        def noting_enqueue(adapter: LiveAdapter, op: Op) -> str | None:
            self.placed[op.request_id] = self.batches
            return enqueue(adapter, op)

        def noting_settle(adapter: LiveAdapter, op: Op, outcome: Outcome, *options: object) -> None:
            self.ended[op.request_id] = self.batches
            settle(adapter, op, outcome, *options)

        vars(runner).update(_execute=counting_execute, enqueue=noting_enqueue)
        vars(settlement).update(settle=noting_settle)


@asynccontextmanager
async def counting(root: Path, tenants: Tenants) -> AsyncIterator[Counted]:
    store = await Store.open(root)
    compute, model = Compute(), replace(mock_model(), tokens_per_batch=BUDGET)
    assert isinstance(model.trainer, MockTrainer)
    model.trainer.pause = 0.05  # far slower than any machine accepts ops, so that a flood fills its queue
    service = model_service(model, store, compute, root, tenants)
    counted = Counted(service, store)
    counted.watch()
    await service.start()
    try:
        yield counted
    finally:
        await service.stop()
        compute.close()
        await store.close()


async def adapters(counted: Counted, tenant_id: str, count: int) -> list[str]:
    now, session = time.time(), f"s-{tenant_id}"
    await counted.store.sessions.create(SessionRecord(session, tenant_id, now, now))
    run_ids = []
    for number in range(count):
        spec = LoraSpec(8, seed=1)
        run = RunRecord(ids.run_id(session, number), session, number, tenant_id, "mock", "mock", spec, now, now)
        await counted.service.create(run, Op(run.run_id, 0, OpKind.CREATE, CreateAdapter(spec), b"create"))
        run_ids.append(run.run_id)
    return run_ids


def step(run_id: str, seq: int) -> tuple[Op, Op]:
    """Return a forward_backward and the optim_step after it."""
    update = Op(run_id, seq + 1, OpKind.OPTIM_STEP, OptimStep(AdamParams(0.1)), b"step")
    return decode_forward_backward(training_body(run_id, seq), Allowance(tokens=1000)), update


async def flood(counted: Counted, run_id: str, refused: list[str]) -> None:
    """Submit steps of one adapter as fast as they are accepted, and repeat refused ones."""
    for seq in itertools.count(1, 2):
        for op in step(run_id, seq):
            while True:
                try:
                    await counted.service.submit(op)
                    break
                except QuotaError as error:
                    refused.append(str(error))
                    await asyncio.sleep(0.01)


async def quiet(counted: Counted, run_id: str) -> list[int]:
    """Train some steps; return how many batches began between the arrival of each step and its end."""
    waited = []
    for seq in range(1, 2 * STEPS, 2):
        for op in reversed(step(run_id, seq)):  # the step is submitted first, so it is there when its gradient is
            await counted.service.submit(op)
        last = f"{run_id}:{seq + 1}"
        outcome = await counted.service.wait(ids.RequestId.parse(last), run_id, 60)
        assert outcome is not None
        assert not outcome.failed
        waited.append(counted.ended[last] - counted.placed[f"{run_id}:{seq}"])
    return waited


@pytest.mark.parametrize(
    "noisy", [TenantShare(), TenantShare(weight=4.0, priority=Priority.HIGH)], ids=["alike", "heavier and before it"]
)
def test_a_flood_of_steps_keeps_nobody_waiting_for_more_than_a_few_batches(tmp_path: Path, noisy: TenantShare) -> None:
    limits = LimitsConfig(max_queued_ops_per_tenant=100)
    tenants = Tenants(TenantTerms(limits), {"noisy": TenantTerms(limits, noisy)})

    async def main() -> tuple[list[int], list[str]]:
        async with counting(tmp_path, tenants) as counted:
            many, (one,) = await adapters(counted, "noisy", 15), await adapters(counted, "quiet", 1)
            refused: list[str] = []
            flooding = [asyncio.create_task(flood(counted, run_id, refused)) for run_id in many]
            while not refused:
                await asyncio.sleep(0.001)
            waited = await quiet(counted, one)
            for task in flooding:
                task.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
            return waited, refused

    waited, refused = asyncio.run(main())
    # The op that an adapter waits for is admitted even if the queue is full, so there may be a few more than 100.
    assert not [each for each in refused if not re.search(r"queued ops: 1\d\d of 100\b", each)]
    # At most two batches of optimizer steps come first, then a batch of passes, which this tenant leads, and then its
    # own optimizer step. Behind a higher priority it waits until it is overdue, which takes eight batches.
    assert max(waited) <= (2 + 1 + 1 if noisy == TenantShare() else 8 + 2 + 1 + 1)
    assert min(waited) >= 2
