"""A server that other machines can reach, for which nobody configured keys: it generates one, once."""

import asyncio
import errno
import json
import os
import pty
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import Server, Tenant, environment, mock_config
from tests.support.servers.state_samples import url_of
from twinkle.errors import TwinkleServerError
from twinkle.server.config import ServerConfig
from twinkle.server.runtime import generated_key
from twinkle.server.runtime.generated_key import prepare_key, prepare_key_of
from twinkle.server.state.backup import back_up
from twinkle.server.state.records.keys import GENERATED_KEY_ID
from twinkle.server.state.store import Store

KEY = re.compile(r"tml-[A-Za-z0-9_-]{43}")


def config_of(data_dir: Path, **sections: object) -> ServerConfig:
    url = url_of(data_dir)
    persistence = {} if url is None else {"persistence": {"url": url}}
    http = {"host": "0.0.0.0"}
    return ServerConfig.model_validate(
        {**mock_config(), "data_dir": str(data_dir), "http_options": http, **persistence, **sections}
    )


def prepared(data_dir: Path, **sections: object) -> list[str]:
    return asyncio.run(prepare_key_of(config_of(data_dir, **sections)))


def revoke(data_dir: Path) -> None:
    async def work() -> None:
        store = await Store.open(data_dir, url_of(data_dir), lock=False)
        await store.keys.revoke(GENERATED_KEY_ID, 1.0)
        await store.close()

    asyncio.run(work())


@pytest.fixture
def data_dir(tmp_path: Path, backend: str) -> Path:
    return tmp_path / "data"


# --- where the key goes -----------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that other machines can reach, not started yet."""
    server = Server(tmp_path)
    server.configure(mock_config(http_options={"host": "0.0.0.0", "port": server.port}))
    yield server
    server.close()


def test_without_a_terminal_the_key_is_in_its_file_only(server: Server) -> None:
    server.start()
    file = server.data_dir / "generated-key"
    key = file.read_text().strip()
    assert KEY.fullmatch(key)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"is in {file}" in server.log()
    tenant = Tenant(server.url, key)
    tenant.json(tenant.save(tenant.model(), 1, "ck"))
    assert tenant.get("auth/apikey/me").json()["name"] == "generated"
    assert Tenant(server.url, "tml-local").post("client/config", {}).status_code == 401
    for path in ("twinkle/training_runs", "models"):
        refused = httpx.get(f"{server.url}/api/v1/{path}", headers={"Authorization": "EMPTY_TOKEN"}, trust_env=False)
        assert refused.status_code == 401
        assert "TINKER_API_KEY" in refused.text
        assert "TWINKLE_SERVER_TOKEN" in refused.text
    assert key not in server.log()
    for other in server.data_dir.rglob("*"):
        assert other == file or not other.is_file() or key.encode() not in other.read_bytes(), other

    server.stop()
    server.start()  # the same key, and no other
    assert Tenant(server.url, file.read_text().strip()).get("training_runs").json()["cursor"]["total_count"] == 1
    assert key not in server.log()
    where = ("-c", str(server.directory / "config.yaml"))
    listed = run_forked(["keys", "list", "--json", *where], environment()).stdout
    assert [(row["key_id"], row["tenant"]) for row in json.loads(listed)] == [(GENERATED_KEY_ID, "generated")]
    revoked = run_forked(["keys", "revoke", GENERATED_KEY_ID, *where], environment()).stdout
    assert revoked.startswith(f"revoked {GENERATED_KEY_ID} of tenant generated (tenant-")
    assert revoked.endswith(f") and deleted {file}, which held it\n")
    assert not file.exists()


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A pseudo-terminal: the end that the test reads, and the end for a program."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


def shown(terminal: tuple[int, int], config: Path) -> str:
    """Launch a server with the terminal as its output, stop it once it serves, and return what it printed."""
    ours, theirs = terminal
    command = [sys.executable, "-m", "twinkle.server", "--config", str(config), "--server-type", "tinker"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment()
    ) as process:
        text = ""
        while "init_twinkle_client" not in text:
            text += os.read(ours, 65_536).decode()
        process.terminate()
    return text


def test_on_a_terminal_the_key_is_shown_once(tmp_path: Path, terminal: tuple[int, int]) -> None:
    config, data_dir = tmp_path / "config.yaml", tmp_path / "data"
    http = {"host": "0.0.0.0", "port": 0}
    config.write_text(
        json.dumps(
            mock_config(runtime="embedded", data_dir=str(data_dir), http_options=http, logging={"level": "INFO"})
        )
    )
    first = shown(terminal, config)
    (key,) = set(KEY.findall(first))
    assert f"export TINKER_API_KEY={key} TWINKLE_SERVER_TOKEN={key}\r\n" in first
    assert first.count("--server-type tinker: has no effect") == 1
    assert not (data_dir / "generated-key").exists()
    for file in data_dir.rglob("*"):
        assert not file.is_file() or key.encode() not in file.read_bytes(), file
    again = shown(terminal, config)
    assert not KEY.search(again)
    assert f"({GENERATED_KEY_ID}) is still valid and is in no file here; another key of the same tenant" in again


# --- later launches ---------------------------------------------------------------------------------------------------


def test_a_file_that_was_deleted(data_dir: Path) -> None:
    first = prepared(data_dir)
    assert first == prepared(data_dir)
    key = (data_dir / "generated-key").read_text().strip()
    assert not [line for line in first if key in line]
    (data_dir / "generated-key").unlink()
    (line,) = prepared(data_dir)
    assert "is in no file here; another key of the same tenant: twinkle-server keys create --tenant tenant-" in line
    assert not (data_dir / "generated-key").exists()


def test_a_revoked_key_is_not_replaced(data_dir: Path) -> None:
    prepared(data_dir)
    key = (data_dir / "generated-key").read_text()
    revoke(data_dir)
    lines = prepared(data_dir)
    assert lines[0].startswith("warning: every key is revoked, so every request is refused")
    assert lines[1] == f"the key in {data_dir / 'generated-key'} is not valid: delete the file"
    assert (data_dir / "generated-key").read_text() == key


def test_a_created_key_is_enough(data_dir: Path) -> None:
    async def work() -> None:
        store = await Store.open(data_dir, url_of(data_dir), lock=False)
        await store.keys.create(None, "alice", 1.0)
        await store.close()

    asyncio.run(work())
    assert prepared(data_dir) == []
    assert not (data_dir / "generated-key").exists()


@pytest.mark.parametrize("auth", [{"mode": "keys"}, {"allow_open_on_network": True}])
def test_configured_keys_generate_none(data_dir: Path, auth: dict[str, object]) -> None:
    assert prepared(data_dir, auth=auth) == []
    assert not data_dir.exists()


# --- several launches, and failures -----------------------------------------------------------------------------------


def test_of_launches_at_the_same_time_one_generates_the_key(data_dir: Path) -> None:
    """They have data directories of their own, or else a lock lets only one begin, and the same database."""
    url = url_of(data_dir) or f"sqlite:///{data_dir}.db"

    async def work() -> None:
        config = config_of(data_dir)
        directories = [data_dir / str(number) for number in range(4)]
        stores = [await Store.open(directory, url, lock=False) for directory in directories]
        await asyncio.gather(*(prepare_key(config, store, may_show=False) for store in stores))
        (record,) = await stores[0].keys.list()
        assert record.key_id == GENERATED_KEY_ID
        (file,) = data_dir.rglob("generated-key")
        winner = stores[directories.index(file.parent)]
        assert await winner.keys.find(file.read_text().strip()) == record
        for store in stores:
            await store.close()

    asyncio.run(work())


def test_the_loser_of_a_race_leaves_no_file(data_dir: Path) -> None:
    """Another launch, with its own data directory and the same database, was first."""

    async def work() -> None:
        store = await Store.open(data_dir, url_of(data_dir), lock=False)
        await store.keys.add_first("tml-of-the-other", 1.0)
        assert await generated_key._write(store, "tml-ours") is None
        assert await generated_key._show(store, "tml-ours") is None
        await store.close()

    asyncio.run(work())
    assert not (data_dir / "generated-key").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_file_that_cannot_be_written(data_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The launch fails, and no key that nobody knows is stored: the next launch generates one."""

    def refuse(_file: Path, _content: bytes) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(generated_key, "write_private", refuse)
        with pytest.raises(TwinkleServerError, match=f"generated-key: {os.strerror(code)}; nothing was stored"):
            prepared(data_dir)
    assert "is in" in prepared(data_dir)[0]


def test_a_database_that_cannot_be_written(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        store = await Store.open(data_dir, url_of(data_dir), lock=False)

        async def fail(_key: str, _now: float) -> None:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(store.keys, "add_first", fail)
        with pytest.raises(OSError, match="full"):
            await prepare_key(config_of(data_dir), store, may_show=False)
        monkeypatch.undo()
        left = (data_dir / "generated-key").read_text()
        await prepare_key(config_of(data_dir), store, may_show=False)  # the next launch
        assert (data_dir / "generated-key").read_text() != left
        assert await store.keys.find((data_dir / "generated-key").read_text().strip()) is not None
        await store.close()

    asyncio.run(work())


def test_a_launch_that_is_interrupted_leaves_no_unknown_key(data_dir: Path) -> None:
    """The interrupt comes while the database stores the hash, which the database does all the same."""

    async def work() -> None:
        store = await Store.open(data_dir, url_of(data_dir), lock=False)
        add, began = store.keys.add_first, asyncio.Event()

        async def slow(key: str, now: float) -> object:
            stored = asyncio.ensure_future(add(key, now))
            began.set()
            await asyncio.shield(stored)
            await asyncio.sleep(60)
            return None

        store.keys.add_first = slow  # type: ignore[method-assign]
        launch = asyncio.ensure_future(prepare_key(config_of(data_dir), store, may_show=False))
        await began.wait()
        launch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launch
        while not await store.keys.list():
            await asyncio.sleep(0.01)
        assert await store.keys.find((data_dir / "generated-key").read_text().strip()) is not None
        await store.close()

    asyncio.run(work())


def test_a_server_with_a_generated_key_does_not_become_open_by_its_address(data_dir: Path) -> None:
    local = {"http_options": {"host": "127.0.0.1"}}
    assert prepared(data_dir, **local) == []
    prepared(data_dir)
    with pytest.raises(TwinkleServerError, match=r"auth\.mode: not given, and by http_options\.host \(127\.0\.0\.1\)"):
        prepared(data_dir, **local)
    for mode in ("keys", "open"):
        assert prepared(data_dir, auth={"mode": mode}, **local) == []


def test_a_backup_does_not_have_the_file(tmp_path: Path) -> None:
    prepared(tmp_path / "data")
    back_up(tmp_path / "data", tmp_path / "data" / "state.db", tmp_path / "backup")
    assert "secret" in os.listdir(tmp_path / "backup")
    assert "generated-key" not in os.listdir(tmp_path / "backup")


def test_a_containers_own_terminal_is_logged(terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with os.fdopen(os.dup(terminal[1]), "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert generated_key._is_read_by_person()
        status = os.fstat(output.fileno())
        monkeypatch.setattr(os, "stat", lambda _path: status)
        assert not generated_key._is_read_by_person()

        def refuse(_path: object) -> None:
            raise PermissionError(errno.EACCES, "process 1 belongs to root")

        monkeypatch.setattr(os, "stat", refuse)
        device = (os.major(status.st_rdev), os.minor(status.st_rdev))
        for terminal_of_first, is_read in ((device, False), ((0, 0), True), (None, True)):
            monkeypatch.setattr(generated_key, "_terminal_of_first_process", lambda answer=terminal_of_first: answer)
            assert generated_key._is_read_by_person() is is_read


def test_the_terminal_of_a_process(terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.fstat(terminal[1])
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    number = (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12  # as the kernel writes it
    monkeypatch.setattr(Path, "read_text", lambda _path: f"1 (a (b) c) S 0 1 1 {number} -1 4194560")
    assert generated_key._terminal_of_first_process() == (major, minor)
