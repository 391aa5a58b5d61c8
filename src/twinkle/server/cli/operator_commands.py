"""Commands about the tenants of a server: ``keys``, ``usage`` and ``evict``.

They work on the server's database, which only operators can write to. The server may run meanwhile; for ``evict`` it
must.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta

from twinkle.errors import NotFoundError, TwinkleServerError
from twinkle.server.cli.config_commands import Commands, add_command, on_store
from twinkle.server.runtime.generated_key import delete_file_of
from twinkle.server.state.errors import DataDirInUseError
from twinkle.server.state.files.guards import DirectoryLock
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


def add_parsers(commands: Commands) -> None:
    keys = commands.add_parser("keys", help="manage API keys, for auth.mode: keys").add_subparsers(
        required=True, metavar="ACTION"
    )
    create = add_command(keys, "create", _create_key, "create a key; it is shown once and not stored")
    create.add_argument("--name", default="", help="what the key is for")
    create.add_argument("--tenant", default=None, help="id of an existing tenant; default: a new tenant for this key")
    add_command(keys, "list", _list_keys, "list ids, tenants and names of keys, but not the keys themselves")
    revoke = add_command(keys, "revoke", _revoke_key, "revoke a key; a running server refuses it within ten seconds")
    revoke.add_argument("key_id", help="id of the key, as shown by keys list")

    usage = add_command(commands, "usage", _usage, "show tokens, steps and storage by tenant and day (UTC)")
    usage.add_argument("--tenant", default=None, help="show only this tenant")
    usage.add_argument(
        "--since", type=_day, default=None, metavar="DAY", help="first day, default 30 days before the last"
    )
    usage.add_argument("--until", type=_day, default=None, metavar="DAY", help="last day, default today")
    usage.add_argument("--format", choices=("table", "json"), default="table", help="default table")

    about = "end runs on a running server; their last state is kept as a checkpoint for a limited time"
    evict = add_command(commands, "evict", _evict, about)
    target = evict.add_mutually_exclusive_group(required=True)
    target.add_argument("run_id", nargs="?", default=None, metavar="RUN_ID", help="id of one run")
    target.add_argument("--tenant", default=None, help="end all live runs of this tenant")
    evict.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="how long to wait, default 120")


# --- keys -------------------------------------------------------------------------------------------------------------


@on_store
async def _create_key(args: argparse.Namespace, store: Store) -> None:
    record, key = await store.keys.create(args.tenant, args.name, time.time())
    print(key)
    print(f"id {record.key_id}, tenant {record.tenant_id}; the key is not stored: keep it now", file=sys.stderr)


@on_store
async def _list_keys(_args: argparse.Namespace, store: Store) -> None:
    for record in await store.keys.list():
        state = "revoked" if record.revoked_at is not None else "active"
        created = datetime.fromtimestamp(record.created_at, UTC).strftime("%Y-%m-%d")
        print(f"{record.key_id}  {record.tenant_id}  {state:8} {created}  {record.name}")


@on_store
async def _revoke_key(args: argparse.Namespace, store: Store) -> None:
    file = await delete_file_of(store, args.key_id)
    if not await store.keys.revoke(args.key_id, time.time()):
        raise TwinkleServerError(f"no active key has the id {args.key_id!r}")
    print(f"revoked {args.key_id}" + ("" if file is None else f" and deleted {file}, which held it"))


# --- usage ------------------------------------------------------------------------------------------------------------


@on_store
async def _usage(args: argparse.Namespace, store: Store) -> None:
    """Print the usage of each tenant, or of ``--tenant``, on the days ``--since`` to ``--until``, both included."""
    until: date = args.until or datetime.now(UTC).date()
    since: date = args.since or until - timedelta(days=30)
    found = await store.usage.list(since.isoformat(), (until + timedelta(days=1)).isoformat(), args.tenant)
    rows = [
        {"day": each.day, "tenant": each.tenant_id, **asdict(each.counts), "storage_bytes": each.storage_bytes}
        for each in found
    ]
    if args.format == "json":
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


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


@on_store
async def _evict(args: argparse.Namespace, store: Store) -> None:
    """Ask the running server to evict runs, and wait for the answers.

    The server looks for such requests in its maintenance, about every fifteen seconds.
    """
    _check_running(store)
    run_ids = [args.run_id] if args.tenant is None else await _live_runs(store, args.tenant)
    asked = [await store.operator_requests.ask(EVICT, run_id, time.time()) for run_id in run_ids]
    deadline = time.monotonic() + args.timeout
    answers = [await _answer(store, each, deadline) for each in asked]
    for answer in answers:
        print(f"{answer.target}: {answer.answer}", file=sys.stderr if answer.failed else sys.stdout)
    if any(answer.failed for answer in answers):
        sys.exit(1)


def _check_running(store: Store) -> None:
    """Raise TwinkleServerError if no server runs. A running server holds the lock of its data directory."""
    with suppress(DataDirInUseError), DirectoryLock(store.data_dir):
        raise TwinkleServerError(f"no server runs on {store.data_dir}, so there is nothing to evict")


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
