"""What only PostgreSQL can do to a store: restart, lose connections, admit servers from other machines."""

import asyncio
import json
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from tests.server.services.test_recovery import STEPS, results, train, undisturbed
from tests.support.servers.postgres_cluster import Cluster, cluster_url, execute, new_database
from tests.support.servers.running import Server, Tenant, mock_config
from tests.support.servers.state_samples import accept, begin, op, run, session
from twinkle.errors import UserError
from twinkle.server.config.timings import DEFAULT_TIMINGS, Timings
from twinkle.server.state.errors import (
    DamagedStateError,
    DatabaseConnectionError,
    DatabaseInUseError,
    DatabaseUnavailableError,
    SchemaVersionError,
    StorageFullError,
)
from twinkle.server.state.store import Store

pytestmark = pytest.mark.skipif(cluster_url() is None, reason="needs PostgreSQL: make test-postgres")

ADAPTER = "s1:train:1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster that tests may stop."""
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def url(cluster: Cluster) -> str:
    return new_database(cluster.url)


@asynccontextmanager
async def store_at(tmp_path, url, lock=True, timings=DEFAULT_TIMINGS):
    store = await Store.open(tmp_path, url, lock=lock, timings=timings)
    try:
        yield store
    finally:
        await store.close()


def end_connections(url: str) -> int:
    """End all connections, as a broken network would; return how many there were."""
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    return len(execute(url, f"SELECT pg_terminate_backend(pid) {others}"))


# --- one server per database ------------------------------------------------------------------------------------------


def test_a_second_server_is_refused_whatever_its_directory(tmp_path, url):
    async def main():
        async with store_at(tmp_path / "one", url):
            with pytest.raises(DatabaseInUseError, match="in use by another server") as caught:
                await Store.open(tmp_path / "two", url)
            assert isinstance(caught.value, OSError)
            async with store_at(tmp_path / "three", url, lock=False) as tool:
                await tool.keys.create("alice", "laptop", 1.0)
        with pytest.raises(DamagedStateError, match="secret is missing"):  # the keys were made with another secret
            await Store.open(tmp_path / "four", url)
        async with store_at(tmp_path / "two", url) as next_one:
            assert len(await next_one.keys.list()) == 1

    asyncio.run(main())


def test_a_damaged_row_costs_its_run(tmp_path, url):
    async def main():
        async with store_at(tmp_path, url) as store:
            await begin(store, 1, 2)
            await accept(store, op(1, b"body", ADAPTER))
            await store.runs.touch({ADAPTER: 500.0})
        async with store_at(tmp_path, url) as store:
            assert await store.damage.list() == ()
        execute(url, f"UPDATE ops SET body_length = body_length + 1 WHERE adapter_id = '{ADAPTER}'")
        execute(url, "UPDATE sessions SET display_name = 'x'")
        for _ in range(2):
            async with store_at(tmp_path, url) as store:
                found = [damage.subject for damage in await store.damage.list()]
                assert sorted(found) == ["row of sessions s1", f"run {ADAPTER}"]
                assert [run.run_id for run in await store.runs.in_state("live")] == ["s1:train:2"]
                assert "load one of its checkpoints" in (await store.runs.get(ADAPTER)).note

    asyncio.run(main())


def test_tables_do_not_change_under_a_server(tmp_path, url):
    async def main():
        async with store_at(tmp_path / "one", url):
            execute(url, "UPDATE schema_version SET version = 1")
            with pytest.raises(DatabaseInUseError):
                await Store.open(tmp_path / "two", url, lock=False)
            execute(url, "UPDATE schema_version SET version = 1000")
            with pytest.raises(SchemaVersionError):
                await Store.open(tmp_path / "two", url, lock=False)

    asyncio.run(main())


def test_a_server_that_was_believed_dead_writes_nothing_any_more(tmp_path, url):
    async def main():
        async with store_at(tmp_path / "one", url, timings=Timings(outage=0.1)) as first:
            await begin(first)
            end_connections(url)
            shutil.copytree(tmp_path / "one", tmp_path / "two")
            async with store_at(tmp_path / "two", url, timings=Timings(outage=0.1)) as second:
                with pytest.raises(DatabaseInUseError):
                    await first.runs.set_state(ADAPTER, "failed")
                await second.runs.set_state(ADAPTER, "parked")
            with pytest.raises(DatabaseInUseError):
                await first.runs.set_state(ADAPTER, "failed")
            assert (await first.runs.get(ADAPTER)).state == "parked"

    asyncio.run(main())


def test_writers_leave_no_rows_behind(tmp_path, url):
    async def main():
        for _ in range(2):
            async with store_at(tmp_path, url), store_at(tmp_path, url, lock=False):
                assert len(execute(url, "SELECT * FROM writers")) == 2

    asyncio.run(main())
    assert execute(url, "SELECT * FROM writers") == []


# --- outages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_nothing_is_lost_or_done_twice_when_the_database_is_restarted(tmp_path, cluster, url, mode, caplog):
    stop = threading.Event()

    async def client(store: Store, adapter_id: str) -> int:
        seq = 0
        while not stop.is_set():
            seq += 1
            accepted = await accept(store, op(seq, f"{adapter_id} {seq}".encode(), adapter_id))
            assert accepted.created
            assert await store.ops.get(adapter_id, seq) == accepted.record
        return seq

    def restart() -> None:
        for _ in range(3):
            time.sleep(0.3)
            cluster.stop(mode)
            cluster.start()
        time.sleep(0.3)
        stop.set()

    async def main():
        async with store_at(tmp_path, url) as store:
            await begin(store, *range(8))
            adapters = [f"s1:train:{number}" for number in range(8)]
            *counts, _ = await asyncio.gather(
                *(client(store, adapter) for adapter in adapters), asyncio.to_thread(restart)
            )
        async with store_at(tmp_path, url) as store:
            for adapter, count in zip(adapters, counts, strict=True):
                records = await store.ops.since(adapter, 0)
                assert [record.seq for record in records] == list(range(1, count + 1))
                for record in records:
                    assert await store.ops.body(record) == f"{adapter} {record.seq}".encode()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "lost the connection to the database" in caplog.text
    assert "the database is back" in caplog.text
    assert "ERROR" not in caplog.text


@pytest.mark.parametrize("committed", [True, False])
def test_an_answer_to_commit_that_never_came(tmp_path, url, monkeypatch, committed):
    async def main():
        async with store_at(tmp_path, url) as store:
            await begin(store)
            driver = store._database._driver
            commit = driver.commit

            def cut_off(cursor) -> None:
                monkeypatch.setattr(driver, "commit", commit)
                if committed:
                    commit(cursor)
                end_connections(url)
                cursor.execute("SELECT 1")

            monkeypatch.setattr(driver, "commit", cut_off)
            before = store._database.transactions
            accepted = await asyncio.gather(*(accept(store, op(seq, str(seq).encode())) for seq in range(1, 21)))
            assert all(one.created for one in accepted)
            assert store._database.transactions - before <= 3  # the first op, and all others, which arrived meanwhile
            assert [record.seq for record in await store.ops.since(ADAPTER, 0)] == list(range(1, 21))
            for one in accepted:
                assert await store.ops.body(one.record) == str(one.record.seq).encode()

    asyncio.run(main())


def test_a_long_outage_is_an_error_until_it_is_over(tmp_path, cluster, url, caplog):
    async def main():
        async with store_at(tmp_path, url, timings=Timings(outage=0.5)) as store:
            await begin(store)
            await asyncio.to_thread(cluster.stop)
            for _ in range(2):
                calls = [accept(store, op(seq)) for seq in range(1, 50)]
                calls += [store.ops.get(ADAPTER, seq) for seq in range(1, 10)]
                for result in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(result, DatabaseUnavailableError)
                    assert "send the request again" in str(result)
            await asyncio.to_thread(cluster.start)
            assert await store.ops.since(ADAPTER, 0) == ()
            assert (await accept(store, op(1))).created

    asyncio.run(main())
    assert "cannot be used: connection" in caplog.text
    _has_no_password(caplog.text, url)


def test_a_commit_in_doubt_waits_and_lets_nobody_else_wait(tmp_path, cluster, url, monkeypatch):
    """A repeated op must not be answered as already accepted unless the commit is known to have succeeded."""

    async def main():
        async with store_at(tmp_path, url, timings=Timings(outage=0.3)) as store:
            await begin(store)
            driver = store._database._driver
            commit = driver.commit

            def stop_behind(cursor) -> None:
                monkeypatch.setattr(driver, "commit", commit)
                commit(cursor)
                cluster.stop()
                cursor.execute("SELECT 1")

            monkeypatch.setattr(driver, "commit", stop_behind)
            doubtful = asyncio.create_task(accept(store, op(1)))
            await asyncio.sleep(0.1)
            with pytest.raises(DatabaseUnavailableError):
                await accept(store, op(2))
            assert not doubtful.done()
            await asyncio.to_thread(cluster.start)
            assert (await doubtful).created
            assert (await accept(store, op(2))).created

    asyncio.run(main())


def test_a_store_can_be_closed_while_the_database_is_away(tmp_path, cluster, url, caplog):
    async def main():
        async with store_at(tmp_path, url) as store:
            await begin(store)
            await asyncio.to_thread(cluster.stop)

    asyncio.run(main())
    cluster.start()
    assert caplog.text == ""


# --- errors -----------------------------------------------------------------------------------------------------------


def _has_no_password(text: str, url: str) -> None:
    assert url.split(":")[2].split("@")[0] not in text


def test_errors_say_why_and_name_no_password(tmp_path, cluster, url):
    password = url.split(":")[2].split("@")[0]
    execute(url, "CREATE ROLE guest LOGIN PASSWORD 'guest-secret'")
    guest = url.replace(f"tester:{password}", "guest:guest-secret")
    for wrong, why in (
        (url.replace(password, "wrong-secret"), "password authentication failed"),
        (url + "_no", "does not exist"),
        (url.replace("127.0.0.1:", "127.0.0.1:1"), "invalid port"),
        (url + "?sslmode=secret", "sslmode"),
        (url + "?sslmode=require", "SSL"),
        (guest, "permission denied for schema public"),
    ):
        with pytest.raises(DatabaseConnectionError, match=why) as caught:
            asyncio.run(Store.open(tmp_path, wrong))
        for text in (str(caught.value), repr(caught.value)):
            _has_no_password(text, url)
            assert "wrong-secret" not in text
            assert "guest-secret" not in text


def test_what_the_database_cannot_hold(tmp_path, url):
    import psycopg

    async def main():
        async with store_at(tmp_path, url) as store:
            with pytest.raises(UserError, match="NUL"):
                await store.sessions.create(session(display_name="a\0b"))
            with pytest.raises(UserError, match="NUL"):
                await store.sessions.get("a\0b")
            await begin(store)
            assert await store.runs.get(ADAPTER) == run(1)
            full = store._database._driver.typed(psycopg.errors.DiskFull("no space left on device"))
            assert isinstance(full, StorageFullError)

    asyncio.run(main())


# --- a server ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_clients_of_a_server_do_not_notice_a_restart(own_server: Callable[..., Server], cluster, url, mode):
    server = own_server(mock_config(persistence={"url": url}), **{"pass": 0.02, "snapshot": 0.1, "housekeeping": 0.2})
    kinds = STEPS + " fb os" * 20

    def train_all(name: str) -> tuple[list[bytes], list[bytes]]:
        tenant = Tenant(server.url, f"tml-{name}")
        model = tenant.model()
        requests = []
        for first in range(1, len(kinds.split()) + 1, 2):
            requests += train(tenant, model, "fb os", first=first)
            tenant.result(requests[-1])
        return results(tenant, requests), undisturbed(tenant, kinds)

    def restart() -> None:
        for _ in range(2):
            time.sleep(0.4)
            cluster.stop(mode)
            time.sleep(0.2)
            cluster.start()

    with ThreadPoolExecutor() as pool:
        training = [pool.submit(train_all, f"restart-{number}") for number in range(3)]
        pool.submit(restart).result()
        for one in training:
            disturbed, expected = one.result()
            assert disturbed == expected
    server.kill()
    server.start()
    log = server.log()
    assert "the database is back" in log
    for text in ("Traceback", "ERROR", "CRITICAL", "never retrieved"):
        assert text not in log, log
    _has_no_password(log, url)


def test_a_server_whose_database_stays_away_says_so_and_goes_on_later(own_server: Callable[..., Server], cluster, url):
    server = own_server(mock_config(persistence={"url": url}), outage=0.3)
    tenant = Tenant(server.url, "tml-away")
    model = tenant.model()
    requests = train(tenant, model, "fb os")
    delivered = results(tenant, requests)
    cluster.stop()
    answer = tenant.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}})
    assert answer.status_code == 503
    assert json.loads(answer.text)["detail"].startswith("the server's database does not answer")
    assert answer.headers["retry-after"] == "1"
    cluster.start()
    assert results(tenant, requests) == delivered
    assert results(tenant, train(tenant, model, "os fb", first=3)) == undisturbed(tenant, "fb os os fb")[2:]
    _has_no_password(server.log(), url)


def test_the_command_line(own_server: Callable[..., Server], tmp_path, cluster, url):
    """Key commands with PostgreSQL, and the message of a server that must not start."""
    server = own_server(mock_config(persistence={"url": url}, auth={"mode": "keys"}))
    config = str(server.directory / "config.yaml")
    made = subprocess.run(server.command("keys", "create", "-c", config), capture_output=True, text=True, check=True)
    assert Tenant(server.url, made.stdout.strip()).model()
    other = tmp_path / "other.yaml"
    other.write_text(json.dumps({**server.config, "data_dir": str(tmp_path / "other"), "http_options": {"port": 0}}))
    (tmp_path / "other").mkdir()
    shutil.copy(server.data_dir / "secret", tmp_path / "other" / "secret")
    refused = subprocess.run(server.command("launch", "-c", str(other)), capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "is in use by another server" in refused.stderr
    for action in ("check-config", "print-config"):
        arguments = [action, config] if action == "check-config" else [action, "-c", config]
        shown = subprocess.run(server.command(*arguments), capture_output=True, text=True, check=True)
        _has_no_password(shown.stdout + shown.stderr, url)
    assert "Traceback" not in refused.stderr
    _has_no_password(refused.stderr, url)
