"""If a batch fails because of a server error, its adapters are not blamed."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.servers.model_services import model_service
from twinkle.model.types import LoraSpec
from twinkle.server import ids
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.backends.mock import mock_model
from twinkle.server.state.errors import DatabaseUnavailableError
from twinkle.server.state.store import Store
from twinkle.server.types import CreateAdapter, Op, OpKind, Outcome, RunRecord, SessionRecord

SPEC = LoraSpec(8, seed=1)


async def created(root: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> tuple[Outcome, str]:
    """Create an adapter, alone in its batch. Return the outcome, and the run's state on record."""
    store, compute, now = await Store.open(root), Compute(), time.time()
    service = model_service(mock_model(), store, compute, root)
    await service.start()
    try:
        await store.sessions.create(SessionRecord("s-1", "tenant", now, now))
        run = RunRecord(ids.run_id("s-1", 0), "s-1", 0, "tenant", "mock", "mock", SPEC, now, now)

        async def away(*_: object, **__: object) -> bool:
            raise DatabaseUnavailableError

        def refuse(*_: object) -> None:
            raise RuntimeError("no such adapter can be made")

        if fails:
            monkeypatch.setattr(service.context.model.trainer, "create_adapter", refuse)
        else:
            monkeypatch.setattr(service.adapters, "make_room_for", away)
        request = await service.create(run, Op(run.run_id, 0, OpKind.CREATE, CreateAdapter(SPEC), b"create"))
        outcome = await service.wait(ids.RequestId.parse(request), run.run_id, 10)
        assert outcome is not None
        await service.stop()
        record = await store.runs.get(run.run_id)
        assert record is not None
        return outcome, record.state
    finally:
        compute.close()
        await store.close()


@pytest.mark.parametrize(
    ("fails", "state"), [(True, "failed"), (False, "live")], ids=["the creation itself", "what comes before it"]
)
def test_only_a_creation_that_ran_fails_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, state: str
) -> None:
    """After a restart the creation is replayed, unless its run has failed: then its journal is discarded."""
    outcome, found = asyncio.run(created(tmp_path, monkeypatch, fails=fails))
    assert outcome.failed
    assert found == state
