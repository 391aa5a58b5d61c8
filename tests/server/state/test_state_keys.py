"""API keys: which tenant they belong to, and that they are never stored."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.servers.state_samples import opened, query, with_store
from twinkle.errors import InvalidInputError
from twinkle.server.state.errors import DamagedStateError
from twinkle.server.state.integrity.copies import read_secret
from twinkle.server.state.records import keys as keys_module
from twinkle.server.state.records.keys import KeyRecord
from twinkle.server.state.store import Store

pytestmark = pytest.mark.usefixtures("backend")


async def tenant_of(store: Store, key: str) -> str | None:
    record = await store.keys.find(key)
    return None if record is None else record.tenant_id


def test_a_key_belongs_to_its_tenant_until_it_is_revoked(tmp_path):
    async def check(store: Store):
        alice, key = await store.keys.create("alice", "laptop", now=5.0)
        new, other = await store.keys.create(None, "cluster", now=6.0)
        assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", key)
        assert (alice.tenant_id, alice.name, alice.created_at, alice.revoked_at) == ("alice", "laptop", 5.0, None)
        assert new.tenant_id not in ("alice", "")
        assert await tenant_of(store, key) == "alice"
        assert await tenant_of(store, other) == new.tenant_id
        for wrong in ("", "tml-", key[:-1], key + "x", key.upper(), "ключ"):
            assert await tenant_of(store, wrong) is None
        assert await store.keys.list() == (alice, new)

        assert await store.keys.revoke(alice.key_id, now=7.0)
        assert not await store.keys.revoke(alice.key_id, now=8.0)
        assert not await store.keys.revoke("key-unknown", now=8.0)
        assert await tenant_of(store, key) is None
        assert await tenant_of(store, other) == new.tenant_id
        assert [record.revoked_at for record in await store.keys.list()] == [7.0, None]

    with_store(tmp_path, check)


def test_keys_survive_and_are_stored_nowhere(tmp_path):
    made: list[str] = []

    async def make(store: Store):
        made.append((await store.keys.create("alice", "laptop", now=5.0))[1])
        made.append("tml-open-mode-key-" + "z" * 29)
        made.append(store.keys.open_tenant(made[1]))
        assert await tenant_of(store, made[0]) == "alice"
        search()

    def search() -> None:
        for path in filter(lambda path: path.is_file(), tmp_path.rglob("*")):
            content = path.read_bytes()
            for key in made[:2]:
                assert key.encode() not in content, path
                assert key.removeprefix("tml-").encode() not in content, path
        for row in query(tmp_path, "SELECT * FROM api_keys"):
            assert not any(key.removeprefix("tml-") in str(row) for key in made[:2])

    async def look(store: Store):
        assert await tenant_of(store, made[0]) == "alice"
        assert store.keys.open_tenant(made[1]) == made[2]

    with_store(tmp_path, make)
    search()
    with_store(tmp_path, look)


def test_in_open_mode_a_key_is_a_tenant(tmp_path):
    async def check(store: Store):
        tenants = {store.keys.open_tenant(f"tml-{number}") for number in range(1000)}
        assert len(tenants) == 1000
        assert store.keys.open_tenant("tml-1") == store.keys.open_tenant("tml-1")
        return store.keys.open_tenant("tml-1")

    assert with_store(tmp_path / "one", check) != with_store(tmp_path / "two", check)  # secrets differ


def test_a_request_costs_no_query(tmp_path, monkeypatch):
    async def check(store: Store):
        _, key = await store.keys.create("alice", "laptop", now=5.0)
        assert await tenant_of(store, key) == "alice"

        async def no_query(work):
            raise AssertionError("queried")

        with monkeypatch.context() as patch:
            patch.setattr(store.keys._database, "read", no_query)
            assert await tenant_of(store, key) == "alice"
            with pytest.raises(AssertionError, match="queried"):
                await tenant_of(store, "tml-unknown")

    with_store(tmp_path, check)


def test_a_tool_makes_and_revokes_keys_beside_the_server(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(keys_module.time, "monotonic", lambda: now)

    async def main():
        nonlocal now
        async with opened(tmp_path) as server, opened(tmp_path, lock=False) as tool:
            record, key = await tool.keys.create("alice", "laptop", now=5.0)
            assert await tenant_of(server, key) == "alice"
            await tool.keys.revoke(record.key_id, now=6.0)
            now += 11.0
            assert await tenant_of(server, key) is None

    asyncio.run(main())


def test_the_cache_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(keys_module, "_CACHE_SIZE", 3)

    async def check(store: Store):
        for _ in range(10):
            _, key = await store.keys.create("alice", "laptop", now=5.0)
            assert await tenant_of(store, key) == "alice"
        assert len(store.keys._found) <= 3

    with_store(tmp_path, check)


def test_whoever_comes_second_reads_the_first_ones_secret(tmp_path):
    first = read_secret(tmp_path, may_make=True)
    assert read_secret(tmp_path, may_make=True) == first
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["copies", "secret"]
    assert len(first) == 64


def test_a_secret_is_put_back_from_its_copy_and_never_made_anew_in_silence(tmp_path, caplog):
    first = read_secret(tmp_path, may_make=True)
    file, copy = tmp_path / "secret", tmp_path / "copies" / "secret"
    for content in (None, b"", first[:10], bytes([first[0] ^ 1]) + first[1:]):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        caplog.clear()
        assert read_secret(tmp_path, may_make=False) == first == file.read_bytes()
        assert str(file) in caplog.text
    copy.write_bytes(copy.read_bytes()[:30])
    assert read_secret(tmp_path, may_make=False) == first
    copy.unlink()
    assert read_secret(tmp_path, may_make=False) == first
    for content in (b"", first[:-1], first.upper() + b"\n"):
        copy.unlink()
        file.write_bytes(content)
        with pytest.raises(DamagedStateError, match=r"secret .*64 hexadecimal.*check-data"):
            read_secret(tmp_path, may_make=True)
        read_back = file.read_bytes()
        assert read_back == content
        copy.write_bytes(b"")
    copy.unlink()
    file.unlink()
    with pytest.raises(DamagedStateError, match="secret is missing"):
        read_secret(tmp_path, may_make=False)


# --- names of tenants -------------------------------------------------------------------------------------------------


def test_a_name_belongs_to_one_tenant(tmp_path):
    async def check(store: Store):
        first, _ = await store.keys.create(None, "alice", now=1.0)
        second, _ = await store.keys.create(None, "alice", now=2.0)
        assert second.key_id != first.key_id
        assert second.tenant_id == first.tenant_id
        laptop, _ = await store.keys.create(first.tenant_id, "laptop", now=3.0)
        bob, _ = await store.keys.create(None, "bob", now=4.0)
        await store.keys.create(bob.tenant_id, "laptop", now=5.0)  # keys of two tenants may have the same name
        nameless, _ = await store.keys.create(None, "", now=6.0)
        assert await store.tenants.names() == {first.tenant_id: "alice", bob.tenant_id: "bob"}
        assert (await store.tenants.known())[nameless.tenant_id] is None
        with pytest.raises(InvalidInputError, match=f"belongs to tenant {first.tenant_id}"):
            await store.keys.create(bob.tenant_id, "alice", now=7.0)
        with pytest.raises(InvalidInputError, match=f"{laptop.key_id} of tenant {first.tenant_id}"):
            await store.keys.create(None, "laptop", now=7.0)
        like_ids = [f"{each[:-1]}{'1' if each.endswith('0') else '0'}" for each in (bob.tenant_id, first.key_id)]
        for wrong in (" alice", "a\nb", "x" * 101, "-x", *like_ids):
            with pytest.raises(InvalidInputError, match="printable"):
                await store.keys.create(None, wrong, now=7.0)
        with pytest.raises(InvalidInputError, match=f"belongs to tenant {first.tenant_id}"):
            await store.tenants.rename(bob.tenant_id, "alice", now=8.0)
        await store.tenants.rename(first.tenant_id, "alicia", now=8.0)
        again, _ = await store.keys.create(None, "alicia", now=9.0)
        assert again.tenant_id == first.tenant_id
        assert len(await store.keys.list()) == 7

    with_store(tmp_path, check)


def test_two_processes_that_create_a_key_for_one_name_make_one_tenant(tmp_path):
    """The stores are those of two commands and a server. They begin at the same time, twenty times."""

    async def check(server: Store):
        async with opened(tmp_path, lock=False) as one, opened(tmp_path, lock=False) as other:
            for number in range(20):
                made = await asyncio.gather(
                    *(store.keys.create(None, f"n{number}", 1.0) for store in (one, other, server))
                )
                assert len({record.tenant_id for record, _ in made}) == 1
            assert len(await server.tenants.names()) == 20

    with_store(tmp_path, check)


def test_the_database_refuses_a_second_tenant_of_a_name(tmp_path):
    async def check(store: Store):
        await store.keys.create(None, "alice", now=1.0)

    with_store(tmp_path, check)
    with pytest.raises(Exception, match=r"(?i)unique"):
        query(tmp_path, "INSERT INTO tenants (tenant_id, name, named_at) VALUES ('other', 'alice', 1.0)")


def older_form(directory: Path, backend: str) -> None:
    """Make the database one of version 9, which had no names of tenants."""
    query(directory, "DROP TABLE tenants")
    query(directory, "UPDATE schema_version SET version = 9")
    if backend == "sqlite":
        query(directory, "PRAGMA user_version = 0")  # which records the form of the tables


def test_a_number_behind_a_name_is_not_the_name_of_another_tenant(tmp_path, backend):
    """A configuration may have limits for alice-2, which are meant for the tenant that always had this name."""
    tenants = {f"tenant-{digit * 24}": name for digit, name in zip("abc", ["alice", "alice", "alice-2"], strict=True)}

    async def make(store: Store):
        for number, (tenant_id, name) in enumerate(tenants.items()):
            await store.keys.create(tenant_id, name, float(number))

    with_store(tmp_path, make)
    older_form(tmp_path, backend)

    async def check(store: Store):
        assert list((await store.tenants.names()).values()) == ["alice", "alice-2", "alice-3"]
        assert await store.tenants.name_of(f"tenant-{'c' * 24}") == "alice-2"

    with_store(tmp_path, check)


def test_an_older_database_with_two_tenants_of_a_name_loses_nothing(tmp_path, backend, caplog):
    """Version 9 made a tenant for each key of the same name. The oldest keeps the name."""
    made: list[tuple[KeyRecord, str]] = []

    first, second, third, nameless = (f"tenant-{digit * 24}" for digit in "abcd")
    tenants = {first: "alice", second: "alice", third: "alice", nameless: "", "chosen-by-hand": "laptop"}

    async def make(store: Store):
        for number, (tenant_id, name) in enumerate(tenants.items()):
            made.append(await store.keys.create(tenant_id, name, float(number)))

    with_store(tmp_path, make)
    older_form(tmp_path, backend)

    async def check(store: Store):
        names = {first: "alice", second: "alice-2", third: "alice-3", "chosen-by-hand": "chosen-by-hand"}
        assert await store.tenants.names() == names
        assert (await store.tenants.known()).keys() == {*names, nameless}
        for record, key in made:
            assert await tenant_of(store, key) == record.tenant_id
        further, _ = await store.keys.create(None, "alice", 7.0)
        assert further.tenant_id == first

    with_store(tmp_path, check)
    assert f"{first} keeps the name, and {second} is named 'alice-2'" in caplog.text
    assert f"{first} keeps the name, and {third} is named 'alice-3'" in caplog.text
    caplog.clear()
    with_store(tmp_path, check)
    assert caplog.text == ""
