"""Versions whose client is answered before their files are on disk: a kill in between loses none of them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.servers.model_services import model_service
from twinkle.model.types import FloatArray, LoraSpec
from twinkle.server import ids
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.backends.mock import MockSampler, mock_model
from twinkle.server.services.checkpoints import save_and_load
from twinkle.server.services.sampling.versions import SamplerVersions
from twinkle.server.services.training.model_service import ModelService
from twinkle.server.state.data_check import check_data
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.types import CreateAdapter, Op, OpKind, Outcome, RunRecord, SessionRecord
from twinkle.server.wire.requests import OptimStepRequest, SaveWeightsForSamplerRequest, to_op
from twinkle.server.wire.training import Allowance
from twinkle.server.wire.training_json import decode_json_pass

SPEC = LoraSpec(8, seed=1)
RUN = ids.run_id("s-1", 0)
SECOND = ids.sampling_session_id("s-1", 1)


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[ModelService]:
    """Run a service over the state in ``root``; the next one recovers from what this one leaves."""
    store, compute = await Store.open(root), Compute()
    service = model_service(mock_model(), store, compute, root)
    await service.start()
    try:
        yield service
        await service.stop()
    finally:
        compute.close()
        await store.close()


async def create(service: ModelService) -> None:
    now, store = time.time(), service.context.store
    await store.sessions.create(SessionRecord("s-1", "tenant", now, now))
    run = RunRecord(RUN, "s-1", 0, "tenant", "mock", "mock", SPEC, now, now)
    await done(service, await service.create(run, Op(RUN, 0, OpKind.CREATE, CreateAdapter(SPEC), b"create")))


async def done(service: ModelService, request: str) -> Outcome:
    outcome = await service.wait(ids.RequestId.parse(request), None, 20)  # type: ignore[arg-type]
    assert outcome is not None
    assert not outcome.failed, outcome.body
    return outcome


async def train(service: ModelService, seq: int) -> None:
    """Take a pass and a step, with the numbers ``seq`` and ``seq + 1``."""
    targets = {"data": [4, 5, 6], "dtype": "int64", "shape": [3]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]},
        "loss_fn_inputs": {"target_tokens": targets},
    }
    asked = {"model_id": RUN, "seq_id": seq, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
    one_pass = decode_json_pass(json.dumps(asked).encode(), OpKind.FORWARD_BACKWARD, Allowance(2**40))
    step = {"model_id": RUN, "seq_id": seq + 1, "adam_params": {"learning_rate": 0.1}}
    await service.submit(one_pass)
    await done(service, await service.submit(to_op(OptimStepRequest, json.dumps(step).encode())))


async def publish(service: ModelService, seq: int, number: int) -> str:
    asked = {"model_id": RUN, "seq_id": seq, "sampling_session_seq_id": number}
    request = await service.submit(to_op(SaveWeightsForSamplerRequest, json.dumps(asked).encode()))
    await done(service, request)
    return request


def weights(service: ModelService, version: str) -> FloatArray:
    sampler = service.context.model.sampler
    assert isinstance(sampler, MockSampler)
    return sampler._versions[version]


def directory(service: ModelService, number: int, seq: int) -> Path:
    return service.context.files.sampler(ids.sampling_session_id("s-1", number), 0, seq)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that makes every write of version files fail (True) or work again (False)."""
    write, full = save_and_load._write_files, [False]

    def write_files(write_to: Callable[[Path], None], place: Path) -> None:
        if full[0]:
            raise OSError(28, "no space left")
        write(write_to, place)

    monkeypatch.setattr(save_and_load, "_write_files", write_files)
    monkeypatch.setattr(save_and_load, "_RETRY_SECONDS", 0.01)
    return lambda is_full: full.__setitem__(0, is_full)


def test_a_replay_rebuilds_a_version_whose_files_were_not_written(
    tmp_path: Path, full_disk: Callable[[bool], None]
) -> None:
    """The client of the version was answered, and has trained on since."""

    async def before() -> FloatArray:
        async with serving(tmp_path) as service:
            await create(service)
            await train(service, 1)
            await publish(service, 3, 0)
            assert directory(service, 0, 3).exists(), "the first version of a run is on disk before it is answered"
            await train(service, 4)
            full_disk(True)
            request = await publish(service, 6, 1)
            assert service.is_unsaved(SECOND)
            assert not directory(service, 1, 6).exists()
            await train(service, 7)
            await service.adapters.snapshot(RUN)
            snapshot = await service.context.store.snapshots.get(RUN)
            assert snapshot is None or snapshot.seq < 6, "no snapshot covers it: only a replay can bring it back"
            number = ids.RequestId.parse(request).number
            assert await service.context.store.ops.outcome(RUN, number) is None
            return weights(service, SECOND)

    async def after(expected: FloatArray) -> None:
        async with serving(tmp_path) as service:
            session = await service.context.store.sampling_sessions.get(SECOND)
            assert session is not None
            await asyncio.wait_for(service.rebuild_version(session), 20)
            assert directory(service, 1, 6).exists()
            np.testing.assert_array_equal(weights(service, SECOND), expected)
            await service.finish_accepted(RUN)
            assert session.size_bytes == sum(
                file.stat().st_size for file in directory(service, 1, 6).iterdir() if file.name != "checksums.json"
            )

    expected = asyncio.run(before())
    assert list(check_data(tmp_path, tmp_path / "state.db")) == [], "it is not damage"
    full_disk(False)
    asyncio.run(after(expected))


def test_one_version_of_a_run_at_a_time_is_unwritten(tmp_path: Path, full_disk: Callable[[bool], None]) -> None:
    """The next one is answered when its own files are on disk. After that a snapshot is possible."""

    async def main() -> None:
        async with serving(tmp_path) as service:
            await create(service)
            await train(service, 1)
            await publish(service, 3, 0)
            full_disk(True)
            await publish(service, 4, 1)
            asked = {"model_id": RUN, "seq_id": 5, "sampling_session_seq_id": 2}
            third = await service.submit(to_op(SaveWeightsForSamplerRequest, json.dumps(asked).encode()))
            outcome = await service.wait(ids.RequestId.parse(third), None, 20)  # type: ignore[arg-type]
            assert outcome is not None
            assert outcome.failed, "its client learns that the disk is full"
            full_disk(False)
            while service.is_unsaved(SECOND):
                await asyncio.sleep(0.01)
            assert directory(service, 1, 4).exists()
            await publish(service, 6, 3)
            adapter = service.adapters.get(RUN)
            assert adapter is not None
            while adapter.unsaved:
                await asyncio.sleep(0.01)
            await service.adapters.snapshot(RUN)

        async with serving(tmp_path) as service:
            snapshot = await service.context.store.snapshots.get(RUN)
            assert snapshot is not None
            assert snapshot.seq == 6

    asyncio.run(main())


def test_a_version_that_is_not_on_disk_is_not_dropped(tmp_path: Path) -> None:
    model = mock_model()
    sampler = model.sampler
    assert isinstance(sampler, MockSampler)
    model.trainer.create_adapter("a", SPEC)
    unsaved = {"v"}
    versions = SamplerVersions(sampler, DataDir(tmp_path), most=1, idle_seconds=1.0, is_unsaved=unsaved.__contains__)
    sampler.publish("v", "a")
    versions.drop_unused(0.0, memory_is_short=True)
    versions.release("v")
    versions.drop_unused(100.0, memory_is_short=True)
    assert sampler.version_ids() == ["v"]
    unsaved.clear()
    versions.drop_unused(101.0, memory_is_short=True)
    assert sampler.version_ids() == []
