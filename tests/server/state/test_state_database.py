"""The database writer: many callers, few transactions, in order, and each caller fails alone."""

import asyncio
import threading
import time

import pytest
from sqlalchemy import bindparam, insert, make_url, select

from tests.support.servers.state_samples import accept, begin, integrity_error, op, opened, session, url_of, with_store
from twinkle.server.state.database import sqlite as sqlite_module
from twinkle.server.state.database.database import Cursor, Database
from twinkle.server.state.database.driver import Role
from twinkle.server.state.database.sqlite import SqliteDriver, default_url
from twinkle.server.state.database.tables import SCHEMA_VERSION, SESSIONS
from twinkle.server.state.errors import StorageFullError, StoreClosedError
from twinkle.server.state.store import Store, driver_of

ADD = insert(SCHEMA_VERSION)
ALL = select(SCHEMA_VERSION).order_by(SCHEMA_VERSION.c.version)


pytestmark = pytest.mark.usefixtures("backend")
on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)


def with_database(tmp_path, test, is_new=True):
    """Run the test on a database with a table of integers."""
    if is_new:
        with_store(tmp_path, _nothing)

    async def main():
        url = url_of(tmp_path)
        driver = SqliteDriver(default_url(tmp_path)) if url is None else driver_of(make_url(url), Role.SERVER)
        database = Database(driver, asyncio.get_running_loop())
        try:
            await test(database)
        finally:
            await database.close()

    asyncio.run(main())


async def _nothing(store: Store) -> None:
    del store


async def numbers(database: Database) -> list[int]:
    """Return the numbers that tests added, which start at 1000."""
    rows = await database.read(lambda cursor: cursor.rows(ALL, {}))
    return [row["version"] for row in rows if row["version"] >= 1000]


def add(number: int):
    return lambda cursor: cursor.execute(ADD, {"version": number})


def test_many_callers_share_few_transactions(tmp_path):
    async def check(store: Store):
        await begin(store, *range(300))
        before = store._database.transactions
        await asyncio.gather(*(accept(store, op(1, adapter_id=f"s1:train:{number}")) for number in range(300)))
        assert store._database.transactions - before <= 10
        records = await asyncio.gather(*(store.ops.get(f"s1:train:{number}", 1) for number in range(300)))
        assert None not in records

    with_store(tmp_path, check)


def test_a_failing_caller_fails_alone_and_leaves_nothing(tmp_path):
    def fail_after_adding(cursor: Cursor) -> None:
        cursor.execute(ADD, {"version": 1000})
        raise ArithmeticError("mine alone")

    async def check(database: Database):
        works = [add(1000 + number) for number in range(50)]
        works[20] = fail_after_adding
        works[30] = lambda cursor: cursor.execute(ADD, {"version": None})
        results = await asyncio.gather(*map(database.write, works), return_exceptions=True)
        failures = {index: result for index, result in enumerate(results) if isinstance(result, Exception)}
        assert failures.keys() == {20, 30}
        assert isinstance(failures[20], ArithmeticError)
        assert isinstance(failures[30], integrity_error())
        assert await numbers(database) == [1000 + number for number in range(50) if number not in (20, 30)]

    with_database(tmp_path, check)


def test_the_same_session_twice_is_an_error_of_the_second(tmp_path):
    async def check(store: Store):
        same = await asyncio.gather(
            *(store.sessions.create(session("same", created_at=float(n))) for n in range(5)), return_exceptions=True
        )
        assert [isinstance(result, integrity_error()) for result in same] == [False, True, True, True, True]

    with_store(tmp_path, check)


def test_writes_take_effect_in_the_order_of_the_calls(tmp_path):
    seen: list[list[int]] = []

    def add_and_look(number: int):
        def work(cursor: Cursor) -> None:
            cursor.execute(ADD, {"version": number})
            seen.append([row["version"] for row in cursor.rows(ALL, {}) if row["version"] >= 1000])

        return work

    async def check(database: Database):
        tasks = [asyncio.create_task(database.write(add_and_look(1000 + number))) for number in range(100)]
        await tasks[60]
        assert (await numbers(database))[:61] == [1000 + number for number in range(61)]
        await asyncio.gather(*tasks)
        assert seen == [[1000 + number for number in range(last + 1)] for last in range(100)]

    with_database(tmp_path, check)


def test_a_cancelled_caller_disturbs_nobody(tmp_path):
    async def check(database: Database):
        tasks = [asyncio.create_task(database.write(add(1000 + number))) for number in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[3], asyncio.CancelledError)
        assert await numbers(database) == list(range(1000, 1010))

    with_database(tmp_path, check)


def test_a_server_and_a_tool_that_write_wait_for_each_other(tmp_path):
    """A transaction that reads before it writes is safe: no other process writes in between."""
    under_way = threading.Event()
    seen: list[str] = []

    def look_and_write(cursor: Cursor) -> None:
        seen.append("server looks")
        under_way.set()
        time.sleep(0.3)
        seen.append("server writes")

    async def main():
        async with opened(tmp_path) as server, opened(tmp_path, lock=False) as tool:
            slow = asyncio.create_task(server._database.write(look_and_write))
            await asyncio.to_thread(under_way.wait)
            await tool._database.write(lambda _: seen.append("tool"))
            await slow

    asyncio.run(main())
    assert seen == ["server looks", "server writes", "tool"]


def test_closing_commits_what_waits_and_refuses_what_comes_later(tmp_path):
    async def check(database: Database):
        tasks = [asyncio.create_task(database.write(add(1000 + number))) for number in range(100)]
        await asyncio.sleep(0)
        await database.close()
        await asyncio.gather(*tasks)
        with pytest.raises(StoreClosedError):
            await database.write(add(999))
        with pytest.raises(StoreClosedError):
            await numbers(database)
        await database.close()

    with_database(tmp_path, check)

    async def look(database: Database):
        assert await numbers(database) == [1000 + number for number in range(100)]

    with_database(tmp_path, look, is_new=False)


@on_sqlite
def test_a_full_disk_under_the_database_is_a_typed_error(tmp_path):
    async def check(database: Database):
        def limit(cursor: Cursor) -> None:
            cursor.driver_cursor.execute("PRAGMA max_page_count=1")  # SQLite raises it to the current size
            cursor.driver_cursor.fetchall()

        await database.write(limit)
        row = dict.fromkeys(SESSIONS.c.keys(), "") | {"session_id": "s", "tags": "x" * 10_000_000}
        with pytest.raises(StorageFullError) as caught:
            await database.write(lambda cursor: cursor.execute(insert(SESSIONS), row))
        assert isinstance(caught.value, OSError)
        await database.write(add(1000))
        assert await numbers(database) == [1000]

    with_database(tmp_path, check)


def test_a_missing_parameter_is_an_error(tmp_path):
    async def check(database: Database):
        statement = select(SCHEMA_VERSION).where(SCHEMA_VERSION.c.version == bindparam("wanted"))
        with pytest.raises(KeyError, match="wanted"):
            await database.read(lambda cursor: cursor.rows(statement, {}))

    with_database(tmp_path, check)


@on_sqlite
def test_the_log_is_copied_into_the_database_behind_the_writers_back(tmp_path, monkeypatch):
    threads = []
    real = sqlite_module.checkpoint

    def watched(driver_cursor):
        threads.append(threading.current_thread().name)
        real(driver_cursor)

    monkeypatch.setattr(sqlite_module, "checkpoint", watched)

    async def check(database: Database):
        for number in range(1000):
            await database.write(add(1000 + number))

    with_database(tmp_path, check)
    assert len(threads) == 3
    assert all(name.startswith("state-reader") for name in threads)
