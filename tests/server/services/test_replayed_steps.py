"""``max_replayed_steps``: after a kill a run of all parameters repeats at most that many optimizer steps."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.servers import state_samples as samples
from tests.support.servers.running import Server, Tenant, datum, mock_config
from twinkle.model.types import LoraSpec
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.backends.mock import mock_model
from twinkle.server.services.training import snapshots as module
from twinkle.server.services.training.run_kind import RunKinds
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store

MOST = 4
STEPS = 30
ROWS = [datum([3, 5, 8, 13])]


def config() -> dict[str, Any]:
    content = mock_config()
    content["applications"][1]["args"] |= {"train_mode": "full", "max_replayed_steps": MOST}
    return content


def begin(tenant: Tenant) -> str:
    session = tenant.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "mock", "type": "create_model"}
    return str(tenant.json(tenant.submit("create_model", body))["model_id"])


def submit(tenant: Tenant, run: str, first: int, count: int) -> list[tuple[str, str]]:
    """Submit passes and steps back to back; return the ids of each pair."""
    pairs = []
    for number in range(first, first + 2 * count, 2):
        pairs.append((tenant.forward_backward(run, number, ROWS), tenant.optim_step(run, number + 1)))
    return pairs


def losses(tenant: Tenant, pairs: list[tuple[str, str]]) -> list[float]:
    found = []
    for passed, stepped in pairs:
        found.append(tenant.loss(passed))
        tenant.json(stepped)
    return found


def uncovered(server: Server, run: str, last: int) -> int:
    """Return how many of the steps up to ``last``, all even numbers, the snapshot on disk does not cover."""
    with sqlite3.connect(f"file:{server.data_dir}/state.db?mode=ro", uri=True) as database:
        found = database.execute("SELECT seq FROM snapshots WHERE adapter_id = ?", (run,)).fetchone()
    covered = 0 if found is None else int(found[0])
    return last // 2 - covered // 2


def test_a_kill_repeats_few_steps(own_server: Callable[..., Server]) -> None:
    """No other snapshot is due in this test: those on disk are there because of the limit."""
    server = own_server(config(), snapshot=3600.0)
    if server.database is not None:
        pytest.skip("reads the SQLite file")
    tenant = Tenant(server.url, "tml-few")
    run = begin(tenant)
    found = losses(tenant, submit(tenant, run, 1, STEPS))
    server.kill()
    assert 0 <= uncovered(server, run, 2 * STEPS) <= MOST
    server.start()
    found += losses(tenant, submit(tenant, run, 2 * STEPS + 1, STEPS))
    server.kill()
    assert uncovered(server, run, 4 * STEPS) <= MOST
    server.start()
    quiet = own_server(config(), snapshot=3600.0)
    other = Tenant(quiet.url, "tml-few")
    expected = losses(other, submit(other, begin(other), 1, 2 * STEPS))
    assert found == expected
    assert len(set(found)) == 2 * STEPS


def test_a_save_under_way_does_not_stop_the_server(own_server: Callable[..., Server]) -> None:
    """A snapshot cannot be taken while a checkpoint is being written; the server must go on with that."""
    server = own_server(config(), snapshot=3600.0)
    tenant = Tenant(server.url, "tml-saves")
    run = begin(tenant)
    number, waiting = 1, []
    for save in range(6):
        pairs = submit(tenant, run, number, MOST // 2)
        waiting += [pairs, [tenant.save(run, number + MOST, f"save-{save}")]]
        number += MOST + 1
    for pairs, saved in zip(waiting[::2], waiting[1::2], strict=True):
        losses(tenant, pairs)
        assert tenant.json(saved[0])["path"]


@pytest.mark.parametrize("most", [None, MOST])
def test_large_snapshots_are_written_less_often(
    most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing takes a twentieth of the time, unless that would leave half of ``max_replayed_steps`` uncovered."""
    seconds, write, run = 0.05, module.write_snapshot, samples.run()

    def slow(*arguments: Any) -> None:
        time.sleep(seconds)
        write(*arguments)

    monkeypatch.setattr(module, "write_snapshot", slow)

    async def main(store: Store) -> None:
        trainer, compute = mock_model().trainer, Compute()
        trainer.create_adapter(run.run_id, LoraSpec(8, seed=1))
        await samples.begin(store)
        model = SimpleNamespace(trainer=trainer, max_replayed_steps=most)
        parts = {"store": store, "files": DataDir(tmp_path), "compute": compute, "kinds": RunKinds()}
        snapshots: Any = module.Snapshots(SimpleNamespace(model=model, snapshot_seconds=0.0, **parts))
        started = time.monotonic()
        try:
            await snapshots.take_now(run.run_id, 1, None)
        finally:
            compute.close()
        for _ in range(MOST // 2):
            assert snapshots.due(started) is None
            snapshots.schedule(run.run_id, started, urgent=True, step=True)
        assert snapshots.due(started) == (None if most is None else run.run_id)
        if most is None:
            later = snapshots.next_due()
            assert later >= started + 20 * seconds
            assert snapshots.due(later) == run.run_id

    samples.with_store(tmp_path, main)


def test_a_copy_that_fails_is_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the adapter cannot be copied, the record of the earlier snapshot must not be advanced past its steps."""
    run = samples.run()

    async def main(store: Store) -> None:
        trainer, compute = mock_model().trainer, Compute()
        trainer.create_adapter(run.run_id, LoraSpec(8, seed=1))
        await samples.begin(store)
        model = SimpleNamespace(trainer=trainer, max_replayed_steps=MOST)
        parts = {"store": store, "files": DataDir(tmp_path), "compute": compute, "kinds": RunKinds()}
        snapshots: Any = module.Snapshots(SimpleNamespace(model=model, snapshot_seconds=0.0, **parts))
        try:
            await snapshots.take_now(run.run_id, 1, None)
            for _ in range(MOST):
                snapshots.schedule(run.run_id, time.monotonic(), step=True)
            with monkeypatch.context() as patch:
                patch.setattr(trainer, "snapshot", out_of_memory)
                with pytest.raises(MemoryError):
                    await snapshots.bring_up_to(run.run_id, 2, None)
            assert snapshots.at_step_limit() == [run.run_id]
            await snapshots.bring_up_to(run.run_id, 2, None)
            await snapshots.finish_writing()
            assert snapshots.at_step_limit() == []
        finally:
            compute.close()
        record = await store.snapshots.get(run.run_id)
        assert record is not None
        assert (tmp_path / record.directory).name.startswith("2-"), "a new snapshot was written"

    def out_of_memory(_adapter_id: str) -> None:
        raise MemoryError

    samples.with_store(tmp_path, main)
