"""``max_replayed_steps``: after a kill a run of all parameters repeats at most that many optimizer steps."""

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.servers.running import Server, Tenant, datum, mock_config

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
