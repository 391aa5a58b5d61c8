"""Commands about the tenants of a server: ``keys``, ``usage`` and ``evict``.

They work on the server's database, which only operators can write to, while the server runs.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta

from filelock import FileLock, Timeout

from twinkle.errors import NotFoundError, TwinkleServerError
from twinkle.server.cli.config_commands import open_store, server_options
from twinkle.server.state.records.coordination import EVICT, OperatorRequest
from twinkle.server.state.store import Store

_POLL_SECONDS = 0.2
_COLUMNS = {
    "day": "day",
    "tenant": "tenant",
    "trained_tokens": "trained tokens",
    "sampled_tokens": "sampled tokens",
    "prompt_tokens": "prompt tokens",
    "optim_steps": "steps",
    "requests": "requests",
    "storage_bytes": "storage bytes",
}
_TEXT_COLUMNS = ("day", "tenant")


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    keys = commands.add_parser("keys", help="manage API keys, for auth.mode: keys").add_subparsers(
        required=True, metavar="ACTION"
    )
    create = keys.add_parser("create", help="create a key; it is shown once and not stored")
    create.set_defaults(run=_create_key)
    create.add_argument("--name", default="", help="what the key is for")
    create.add_argument("--tenant", default=None, help="id of an existing tenant; without it the key is a new tenant")
    listing = keys.add_parser("list", help="list keys, without the keys themselves")
    listing.set_defaults(run=_list_keys)
    revoke = keys.add_parser("revoke", help="make a key useless")
    revoke.set_defaults(run=_revoke_key)
    revoke.add_argument("key_id", help="id of the key, as keys list shows it")

    usage = commands.add_parser("usage", help="show tokens, steps and storage by tenant and day (UTC)")
    usage.set_defaults(run=_usage)
    usage.add_argument("--tenant", default=None, help="show this tenant alone")
    usage.add_argument("--since", type=_day, default=None, metavar="DAY", help="first day, default 30 days ago")
    usage.add_argument("--until", type=_day, default=None, metavar="DAY", help="last day, default today")
    usage.add_argument("--format", choices=("table", "json"), default="table", help="default table")

    evict = commands.add_parser("evict", help="take adapters off the device of a running server; their state is kept")
    evict.set_defaults(run=_evict)
    target = evict.add_mutually_exclusive_group(required=True)
    target.add_argument("run_id", nargs="?", default=None, metavar="RUN_ID", help="one adapter")
    target.add_argument("--tenant", default=None, help="all adapters of this tenant")
    evict.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="how long to wait, default 120")
    for parser in (create, listing, revoke, usage, evict):
        server_options(parser)


# --- keys -------------------------------------------------------------------------------------------------------------


def _create_key(args: argparse.Namespace, _given: list[str]) -> None:
    async def create() -> None:
        async with open_store(args) as store:
            record, key = await store.keys.create(args.tenant, args.name, time.time())
        print(key)
        print(f"id {record.key_id}, tenant {record.tenant_id}; the key is not stored: keep it now", file=sys.stderr)

    asyncio.run(create())


def _list_keys(args: argparse.Namespace, _given: list[str]) -> None:
    async def listing() -> None:
        async with open_store(args) as store:
            for record in await store.keys.list():
                state = "revoked" if record.revoked_at is not None else "active"
                created = datetime.fromtimestamp(record.created_at, UTC).strftime("%Y-%m-%d")
                print(f"{record.key_id}  {record.tenant_id}  {state:8} {created}  {record.name}")

    asyncio.run(listing())


def _revoke_key(args: argparse.Namespace, _given: list[str]) -> None:
    async def revoke() -> bool:
        async with open_store(args) as store:
            return await store.keys.revoke(args.key_id, time.time())

    if not asyncio.run(revoke()):
        raise TwinkleServerError(f"no active key has the id {args.key_id!r}")
    print(f"revoked {args.key_id}")


# --- usage ------------------------------------------------------------------------------------------------------------


def _usage(args: argparse.Namespace, _given: list[str]) -> None:
    until: date = args.until or datetime.now(UTC).date()
    since: date = args.since or until - timedelta(days=30)
    rows = asyncio.run(_rows(args, since, until))
    if args.format == "json":
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


async def _rows(args: argparse.Namespace, since: date, until: date) -> list[dict[str, object]]:
    """Return the usage of each tenant on each day, both ends included."""
    async with open_store(args) as store:
        after = until + timedelta(days=1)
        found = await store.usage.list(since.isoformat(), after.isoformat(), args.tenant)
    return [
        {"day": each.day, "tenant": each.tenant_id, **asdict(each.counts), "storage_bytes": each.storage_bytes}
        for each in found
    ]


def _print_table(rows: Sequence[dict[str, object]]) -> None:
    table = [list(_COLUMNS.values()), *([str(row[name]) for name in _COLUMNS] for row in rows)]
    widths = [max(len(line[index]) for line in table) for index in range(len(_COLUMNS))]
    for line in table:
        cells = zip(_COLUMNS, line, widths, strict=True)
        aligned = (cell.ljust(width) if name in _TEXT_COLUMNS else cell.rjust(width) for name, cell, width in cells)
        print("  ".join(aligned))


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a day such as 2026-01-31") from None


# --- evict ------------------------------------------------------------------------------------------------------------


def _evict(args: argparse.Namespace, _given: list[str]) -> None:
    """Ask the running server to evict adapters. It answers at its next maintenance, within about fifteen seconds."""
    answers = asyncio.run(_ask(args))
    for answer in answers:
        print(f"{answer.target}: {answer.answer}", file=sys.stderr if answer.failed else sys.stdout)
    if any(answer.failed for answer in answers):
        sys.exit(1)


async def _ask(args: argparse.Namespace) -> list[OperatorRequest]:
    async with open_store(args) as store:
        _check_running(store)
        run_ids = [args.run_id] if args.tenant is None else await _live_runs(store, args.tenant)
        asked = [await store.operator_requests.ask(EVICT, run_id, time.time()) for run_id in run_ids]
        deadline = time.monotonic() + args.timeout
        return [await _answer(store, each, deadline) for each in asked]


def _check_running(store: Store) -> None:
    """A server holds the lock of its data directory."""
    lock = FileLock(store.data_dir / "lock", mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return
    lock.release()
    raise TwinkleServerError(f"no server runs on {store.data_dir}: there is no device to take an adapter off")


async def _live_runs(store: Store, tenant_id: str) -> list[str]:
    runs = [run.run_id for run in await store.runs.in_state("live") if run.tenant_id == tenant_id]
    if not runs:
        raise NotFoundError("tenant with live adapters", tenant_id)
    return runs


async def _answer(store: Store, asked: OperatorRequest, deadline: float) -> OperatorRequest:
    while time.monotonic() < deadline:
        found = await store.operator_requests.get(asked.request_id)
        if found is not None and found.answer is not None:
            await store.operator_requests.withdraw(asked.request_id)
            return found
        await asyncio.sleep(_POLL_SECONDS)
    await store.operator_requests.withdraw(asked.request_id)
    raise TwinkleServerError(f"the server did not answer in time; {asked.target} may still be evicted if it had begun")
