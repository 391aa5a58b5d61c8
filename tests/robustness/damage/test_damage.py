"""Flip one bit or truncate one file in the data directory of a server with five tenants, then start the server.

300 flips and 50 truncations, each on its own copy (DAMAGE_COUNT=20 makes 20 in all; DAMAGE_SEED repeats a run). One of
these must hold, whatever is hit:

- The start is refused with a message that names the file and a command. This is allowed only for data that all
  tenants depend on.
- The server starts, and everything is as without damage: the bytes were unused, or the damage was repaired.
- The server starts, and the tenant whose bytes were hit gets errors that name the damage. All others get bit-equal
  results, weights, checkpoints and samples. The log names the damage too.
"""

import json
import os
import random
import re
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.servers.running import RUNTIME, Server, Tenant, datum, key_for
from twinkle.server.ids import directory_name

pytestmark = [
    pytest.mark.damage,
    pytest.mark.skipif(RUNTIME != "embedded", reason="the files are those of one process on SQLite"),
]

TENANTS = 5
COUNT = int(os.environ.get("DAMAGE_COUNT", "350"))
SEED = int(os.environ.get("DAMAGE_SEED", str(random.randrange(10**6))))
ROW = [datum([3, 1, 4, 1, 5, 9, 2, 6])]
_MAY_REFUSE = ("state.db", "state.db-wal", "secret")
# Weights for choosing the kind of file to hit, so that small files are hit too.
_KINDS = {
    "state.db": 8,
    "state.db-wal": 4,
    "state.db-shm": 1,
    "secret": 2,
    "copies": 2,
    "journal/bodies": 5,
    "journal/outcomes": 5,
    "snapshots": 5,
    "checkpoints": 4,
    "samplers": 3,
    "other": 1,
}


@dataclass
class Work:
    """What one tenant did before the server was killed."""

    tenant: Tenant
    model: str
    requests: list[str]  # all request ids, fetched or not
    checkpoint: str
    sampler: str
    next_seq: int


def test_damage_costs_only_its_owner_and_is_never_silent(tmp_path: Path) -> None:
    print(f"\nDAMAGE_SEED={SEED} DAMAGE_COUNT={COUNT}")
    chance = random.Random(SEED)
    server = Server(_made(tmp_path / "original"), snapshot=0.2, housekeeping=3600.0)
    works = [_work(server.start() if number == 0 else server, number) for number in range(TENANTS)]
    _close_once(server, works)
    # a copy, because closing the last connection to a database empties its WAL
    looked_at = _copied(server, tmp_path / "looked-at")
    owners = _owners(looked_at.data_dir, works)
    expected = _start_and_ask(server, tmp_path / "undamaged", works)
    assert isinstance(expected, list), expected
    verdicts: Counter[str] = Counter()
    for number in range(COUNT):
        cut = number % 7 == 6
        copy = _copied(server, tmp_path / "copy")
        hit = _damage(copy.data_dir, chance, cut=cut)
        verdict = _verdict(copy, hit, works, expected, owners)
        verdicts[f"{hit.kind}: {verdict}"] += 1
        print(f"{number:3} {hit}: {verdict}", flush=True)
        shutil.rmtree(copy.directory)
    print("\n".join(f"{count:4} {what}" for what, count in sorted(verdicts.items())))


# --- before the damage ------------------------------------------------------------------------------------------------


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _work(server: Server, number: int) -> Work:
    """Do the work of one tenant.

    It trains steps, some before a snapshot, saves a checkpoint and a version, runs forward passes, and leaves results
    unfetched.
    """
    tenant = Tenant(server.url, key_for(f"damage-{number}"))
    model = tenant.model(seed=number)
    requests = [f"{model}:0"]
    seq = 0
    for _ in range(3):
        requests += [tenant.forward_backward(model, seq + 1), tenant.optim_step(model, seq + 2)]
        seq += 2
        tenant.result(requests[-1])
    saved = tenant.save(model, seq + 1, "saved")
    checkpoint = str(tenant.json(saved)["path"])
    published = tenant.publish(model, seq + 2)
    sampler = str(tenant.json(published)["sampling_session_id"])
    requests += [saved, published, tenant.forward_backward(model, seq + 3, ROW, forward_only=True)]
    seq += 3
    time.sleep(1.0)  # time for a snapshot
    for _ in range(2):
        requests += [tenant.forward_backward(model, seq + 1), tenant.optim_step(model, seq + 2)]
        seq += 2
    return Work(tenant, model, requests, checkpoint, sampler, seq + 1)


def _close_once(server: Server, works: list[Work]) -> None:
    """Restart once, work, and kill: half of the tenants' rows are then in the database file, half in its WAL."""
    assert server.stop() == 0
    server.start()
    for work in works:
        for _ in range(2):
            fb = work.tenant.forward_backward(work.model, work.next_seq)
            step = work.tenant.optim_step(work.model, work.next_seq + 1)
            work.tenant.json(step)
            work.requests += [fb, step]
            work.next_seq += 2
    time.sleep(0.5)
    server.kill()


def _owners(data_dir: Path, works: list[Work]) -> dict[tuple[str, int], list[tuple[int, int, int]]]:
    """Return (first byte, end, tenant's number) of all blobs in the journal, by kind and segment."""
    numbers = {work.model: number for number, work in enumerate(works)}
    blobs: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    with closing(sqlite3.connect(data_dir / "state.db")) as database:
        for kind, place in (("bodies", "body"), ("outcomes", "outcome")):
            columns = ", ".join(f"{place}_{part}" for part in ("segment", "offset", "length"))
            rows = database.execute(f"SELECT adapter_id, {columns} FROM ops WHERE {place}_segment IS NOT NULL")
            for adapter, segment, offset, length in rows:
                blobs.setdefault((kind, segment), []).append((offset, offset + 16 + length, numbers[adapter]))
    return blobs


# --- the damage -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hit:
    file: str
    kind: str
    offset: int
    bit: int | None  # None: the file is truncated at the offset

    def __str__(self) -> str:
        what = "cut" if self.bit is None else f"bit {self.bit}"
        return f"{self.file} at {self.offset}, {what}"


def _copied(server: Server, directory: Path) -> Server:
    shutil.copytree(server.directory, directory)
    copy = Server(directory, **server.tuning)
    (directory / "server.log").unlink()
    return copy


def _damage(data_dir: Path, chance: random.Random, *, cut: bool) -> Hit:
    by_kind: dict[str, list[Path]] = {}
    for path in sorted(path for path in data_dir.rglob("*") if path.is_file() and path.stat().st_size):
        by_kind.setdefault(_kind(path.relative_to(data_dir)), []).append(path)
    kinds = sorted(by_kind)
    kind = chance.choices(kinds, [_KINDS[kind] for kind in kinds])[0]
    path = chance.choice(by_kind[kind])
    content = bytearray(path.read_bytes())
    used = _used_bytes(path, content)
    offset = chance.randrange(len(content)) if not used or chance.random() < 0.5 else chance.choice(used)
    bit = None if cut else chance.randrange(8)
    if bit is None:
        path.write_bytes(content[:offset])
    else:
        content[offset] ^= 1 << bit
        path.write_bytes(content)
    return Hit(path.relative_to(data_dir).as_posix(), kind, offset, bit)


def _kind(path: Path) -> str:
    for kind in _KINDS:
        if path.as_posix() == kind or path.as_posix().startswith(f"{kind}/"):
            return kind
    return "other"


def _used_bytes(path: Path, content: bytes) -> list[int]:
    """Return the non-zero bytes of a database, which are hit more often: most of its bytes are free."""
    return [place for place, byte in enumerate(content) if byte] if path.name == "state.db" else []


# --- after the damage -------------------------------------------------------------------------------------------------


def _verdict(
    copy: Server,
    hit: Hit,
    works: list[Work],
    expected: list[dict[str, bytes]],
    owners: dict[tuple[str, int], list[tuple[int, int, int]]],
) -> str:
    found = _start_and_ask(copy, None, works)
    log = copy.log()
    if isinstance(found, str):
        assert hit.file in _MAY_REFUSE, f"{hit}: the start was refused\n{log}"
        assert hit.file in found, f"{hit}: the refusal does not name it\n{log}"
        assert "twinkle-server check-data" in found, f"{hit}: the refusal names no command\n{log}"
        return "refused"
    affected = {number for number, answers in enumerate(found) if answers != expected[number]}
    differing = {
        number: [what for what in expected[number] if found[number].get(what) != expected[number][what]]
        for number in affected
    }
    if not affected:
        return "put right" if "damaged" in log else "nothing changed"
    assert "damaged" in log, f"{hit}: {differing} differ, and the log says nothing\n{log}"
    assert len(affected) == 1 or hit.bit is None, f"{hit}: {differing} differ\n{log}"
    owner = _owner(hit, works, owners)
    assert owner is None or affected <= owner, f"{hit}: {differing} differ, but the bytes are those of {owner}\n{log}"
    for number in affected:
        for what in differing[number]:
            said = found[number].get(what, b"").decode(errors="replace")
            assert re.search(r"damaged|checkpoint|expired|new client", said), f"{hit}: {what}: {said}\n{log}"
    return "cost its owner"


def _owner(hit: Hit, works: list[Work], owners: dict[tuple[str, int], list[tuple[int, int, int]]]) -> set[int] | None:
    """Return the tenants whose bytes were hit; None if that is not known."""
    parts = Path(hit.file).parts
    if parts[0] == "journal":
        blobs = owners.get((parts[1], int(Path(hit.file).stem)), []) if parts[1] in ("bodies", "outcomes") else []
        end = hit.offset + 1 if hit.bit is not None else 2**62
        return {tenant for first, behind, tenant in blobs if first < end and behind > hit.offset}
    if parts[0] in ("snapshots", "checkpoints", "samplers"):
        whose = [n for n, work in enumerate(works) if parts[1].startswith(directory_name(work.model.split(":")[0]))]
        return set(whose)
    return None


def _start_and_ask(server: Server, directory: Path | None, works: list[Work]) -> list[dict[str, bytes]] | str:
    """Start the server and return each tenant's answers by request. If it did not start, return its message."""
    running = server if directory is None else _copied(server, directory)
    running.spawn()
    assert running.process is not None
    deadline = time.monotonic() + 120
    try:
        while not running.is_healthy():
            if running.process.poll() is not None:
                assert running.process.returncode not in (0, -9, -11), running.log()
                return running.log().strip().splitlines()[-1]
            assert time.monotonic() < deadline, running.log()
            time.sleep(0.02)
        return [_answers(Tenant(running.url, work.tenant.key), work) for work in works]
    finally:
        running.close()


def _answers(tenant: Tenant, work: Work) -> dict[str, bytes]:
    answers = {request: _answer(tenant, request) for request in work.requests}
    seq = work.next_seq
    answers["weights"] = _submitted(tenant, lambda: tenant.forward_backward(work.model, seq, ROW, forward_only=True))
    answers["sample"] = _submitted(tenant, lambda: tenant.sample(work.sampler))
    answers["checkpoint"] = _loaded(tenant, work)
    tenant.http.close()
    return answers


def _answer(tenant: Tenant, request_id: str) -> bytes:
    for _ in range(20):
        answer = tenant.poll(request_id)
        if answer.status_code != 408:
            return answer.content
    raise AssertionError(f"{request_id} has no answer")


def _submitted(tenant: Tenant, submit: Callable[[], str]) -> bytes:
    try:
        return _answer(tenant, submit())
    except (AssertionError, httpx.HTTPError) as error:
        return str(error).encode()


def _loaded(tenant: Tenant, work: Work) -> bytes:
    """Load the tenant's checkpoint into a new model of a new session."""
    try:
        model = tenant.model(seed=99)
        said = json.loads(_answer(tenant, tenant.load(model, 1, work.checkpoint)))
        if "error" in said:
            return str(said["error"]).encode()
        return _answer(tenant, tenant.forward_backward(model, 2, ROW, forward_only=True))
    except AssertionError as error:
        return str(error).encode()
