"""Commands about the work of tenants: ``runs``, ``tenants``, ``usage`` and ``evict``.

They work on the server's database, which only operators can write to. The server may run meanwhile; for ``evict`` it
must.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta

from twinkle.errors import TwinkleServerError
from twinkle.server.cli.config_commands import Commands, add_command, on_store
from twinkle.server.cli.names import Names, Tenant, find_run
from twinkle.server.cli.tables import add_json, age, iso, print_json, print_rows, size
from twinkle.server.state.errors import DataDirInUseError
from twinkle.server.state.files.guards import DirectoryLock
from twinkle.server.state.records.coordination import EVICT, OperatorRequest
from twinkle.server.state.records.tenants import Activity
from twinkle.server.state.records.usage import DailyUsage
from twinkle.server.state.store import Store
from twinkle.server.types import RunRecord
from twinkle.server.usage import UsageCounts

_POLL_SECONDS = 0.2
_WRONG_USE = 2  # exit code
_SHOWN_RUNS = 100
_COUNTS = {
    "trained_tokens": "trained tokens",
    "sampled_tokens": "sampled tokens",
    "prompt_tokens": "prompt tokens",
    "optim_steps": "steps",
    "requests": "requests",
}
_USAGE = {"tenant": "tenant", **_COUNTS, "storage": "storage", "tenant_id": "tenant id"}
_RUNS = {
    "run_id": "run",
    "name": "name",
    "tenant": "tenant",
    "base_model": "base model",
    "rank": "rank",
    "state": "state",
    "replica": "replica",
    "last_request": "last request",
}
_TENANTS = {
    "tenant": "tenant",
    "keys": "keys",
    "adapters": "adapters",
    "storage": "storage",
    "trained_tokens": "trained tokens",
    "sampled_tokens": "sampled tokens",
    "last_seen": "last seen",
    "tenant_id": "tenant id",
}


def add_parsers(commands: Commands) -> None:
    runs = add_command(commands, "runs", _runs, "list the runs of all tenants, latest request first")
    runs.add_argument("--tenant", default=None, metavar="NAME", help="only runs of this tenant, by name or id")
    runs.add_argument("--state", choices=("live", "parked", "failed"), default=None, help="only runs in this state")
    runs.add_argument(
        "--limit", type=_count, default=_SHOWN_RUNS, metavar="N", help=f"at most N runs, default {_SHOWN_RUNS}"
    )
    add_json(runs)

    tenants = add_command(commands, "tenants", _tenants, "list all tenants: keys, adapters, storage, tokens so far")
    tenants.add_argument("tenant", nargs="*", metavar="TENANT", help="only these tenants, by name or id")
    add_json(tenants)

    usage = add_command(commands, "usage", _usage, "show tokens, steps and storage by tenant, most tokens first")
    usage.add_argument("--tenant", default=None, metavar="NAME", help="only this tenant, by name or id")
    usage.add_argument(
        "--since", type=_day, default=None, metavar="DAY", help="first day (UTC), default 30 days before the last"
    )
    usage.add_argument("--until", type=_day, default=None, metavar="DAY", help="last day (UTC), default today")
    usage.add_argument("--by-day", action="store_true", help="one row for each tenant and day")
    usage.add_argument("--format", choices=("table", "json"), default="table", help="json: the same as --json")
    add_json(usage)

    about = "end runs on a running server; their last state is kept as a checkpoint for a limited time"
    evict = add_command(commands, "evict", _evict, about)
    evict.add_argument("run_id", nargs="?", default=None, metavar="RUN", help="id of a run, or the name of a live run")
    evict.add_argument(
        "--tenant", default=None, metavar="NAME", help="only runs of this tenant; without RUN: all its live runs"
    )
    evict.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="how long to wait, default 120")
    add_json(evict)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a day such as 2026-01-31") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a number from 1 on")
    return int(text)


# --- runs and tenants -------------------------------------------------------------------------------------------------


@on_store
async def _runs(args: argparse.Namespace, store: Store) -> None:
    names = await Names.read(store)
    tenant = None if args.tenant is None else names.find(args.tenant)
    found = [
        run
        for run in await store.runs.latest()
        if (tenant is None or run.tenant_id == tenant.tenant_id) and args.state in (None, run.state)
    ]
    rows = [_run(run, names.tenant(run.tenant_id)) for run in found[: args.limit]]
    if args.json:
        print_json(rows)
    else:
        titles = dict(_RUNS)
        if not any(row["replica"] for row in rows):
            del titles["replica"]
        shown = [
            {**row, "tenant": row["tenant"] or row["tenant_id"], "last_request": age(run.last_request_at)}
            for row, run in zip(rows, found, strict=False)
        ]
        print_rows(shown, titles, "no runs" if tenant is None else f"no runs of tenant {tenant}")
    if len(found) > len(rows):
        print(f"{len(found) - len(rows)} more runs: --limit {len(found)} lists all", file=sys.stderr)


def _run(run: RunRecord, tenant: Tenant) -> dict[str, object]:
    return {
        "run_id": run.run_id,
        "name": run.name,
        "tenant": tenant.name,
        "tenant_id": run.tenant_id,
        "base_model": run.base_model,
        "rank": "all" if run.lora is None else run.lora.rank,  # all: it trains all parameters
        "state": run.state,
        "replica": run.replica,
        "created_at": iso(run.created_at),
        "last_request_at": iso(run.last_request_at),
        "note": run.note,
    }


@on_store
async def _tenants(args: argparse.Namespace, store: Store) -> None:
    names = await Names.read(store)
    chosen = [names.find(given) for given in args.tenant] or list(names.tenants.values())
    keys, activity, storage = await store.keys.list(), await store.tenants.activity(), await store.usage.storage()
    totals = _by_tenant(await store.usage.list("", "9999"))
    rows = []
    for tenant in dict.fromkeys(chosen):
        active = activity.get(tenant.tenant_id, Activity())
        counts = totals[tenant.tenant_id].counts if tenant.tenant_id in totals else UsageCounts()
        rows.append(
            {
                "tenant": tenant.name,
                "tenant_id": tenant.tenant_id,
                "keys": sum(key.tenant_id == tenant.tenant_id and key.revoked_at is None for key in keys),
                "adapters": active.live_runs,
                "storage_bytes": storage.get(tenant.tenant_id, 0),
                "trained_tokens": counts.trained_tokens,
                "sampled_tokens": counts.sampled_tokens,
                "last_seen_at": iso(active.last_seen),
                "last_seen": age(active.last_seen),
            }
        )
    if args.json:
        print_json([{key: value for key, value in row.items() if key != "last_seen"} for row in rows])
        return
    shown = [{**row, "storage": size(storage.get(str(row["tenant_id"]), 0))} for row in rows]
    print_rows(shown, _TENANTS, "no tenants yet")


# --- usage ------------------------------------------------------------------------------------------------------------


@on_store
async def _usage(args: argparse.Namespace, store: Store) -> None:
    """Print the usage of each tenant, or of ``--tenant``, on the days ``--since`` to ``--until``, both included."""
    names = await Names.read(store)
    tenant = None if args.tenant is None else names.find(args.tenant)
    until: date = args.until or datetime.now(UTC).date()
    since: date = args.since or until - timedelta(days=30)
    days = await store.usage.list(
        since.isoformat(), (until + timedelta(days=1)).isoformat(), None if tenant is None else tenant.tenant_id
    )
    if args.until is None and not args.by_day:  # the disk space of today is recorded every few minutes only
        today = [DailyUsage(owner, "", UsageCounts(), now) for owner, now in (await store.usage.storage()).items()]
        days = (*days, *(each for each in today if tenant is None or each.tenant_id == tenant.tenant_id))
    found = days if args.by_day else sorted(_by_tenant(days).values(), key=lambda each: -_tokens(each))
    rows = [_used(each, names.tenant(each.tenant_id), by_day=args.by_day) for each in found]
    if args.json or args.format == "json":
        print_json(rows)
        return
    shown = [
        {**row, "tenant": row["tenant"] or "-", "storage": size(each.storage_bytes)}
        for row, each in zip(rows, found, strict=True)
    ]
    whose = "no usage" if tenant is None else f"no usage of tenant {tenant}"
    titles = {"day": "day", **_USAGE} if args.by_day else _USAGE
    print_rows(shown, titles, f"{whose} from {since.isoformat()} to {until.isoformat()}")


def _by_tenant(days: Sequence[DailyUsage]) -> dict[str, DailyUsage]:
    """Return the sum of the days of each tenant, by its id; of storage the largest value counts."""
    total: dict[str, DailyUsage] = {}
    for each in days:
        before = total.get(each.tenant_id, DailyUsage(each.tenant_id, "", UsageCounts(), 0))
        most = max(before.storage_bytes, each.storage_bytes)
        total[each.tenant_id] = DailyUsage(each.tenant_id, "", before.counts + each.counts, most)
    return total


def _tokens(each: DailyUsage) -> int:
    return each.counts.trained_tokens + each.counts.sampled_tokens + each.counts.prompt_tokens


def _used(each: DailyUsage, tenant: Tenant, *, by_day: bool) -> dict[str, object]:
    day = {"day": each.day} if by_day else {}
    whose = {"tenant": tenant.name, "tenant_id": tenant.tenant_id}
    return {**day, **whose, **asdict(each.counts), "storage_bytes": each.storage_bytes}


# --- evict ------------------------------------------------------------------------------------------------------------


@on_store
async def _evict(args: argparse.Namespace, store: Store) -> None:
    """Ask the running server to evict runs, and wait for the answers.

    The server looks for such requests in its maintenance, about every fifteen seconds.
    """
    if args.run_id is None and args.tenant is None:
        print("twinkle-server: evict needs RUN (the id or the name of a run), --tenant NAME, or both", file=sys.stderr)
        sys.exit(_WRONG_USE)
    tenant = None if args.tenant is None else (await Names.read(store)).find(args.tenant)
    if args.run_id is not None:
        run_ids = [(await find_run(store, args.run_id, tenant)).run_id]
    else:
        assert tenant is not None
        run_ids = [run.run_id for run in await store.runs.in_state("live") if run.tenant_id == tenant.tenant_id]
        if not run_ids:
            raise TwinkleServerError(f"tenant {tenant} has no live run")
    _check_running(store)
    asked = [await store.operator_requests.ask(EVICT, run_id, time.time()) for run_id in run_ids]
    deadline = time.monotonic() + args.timeout
    answers = [await _answer(store, each, deadline) for each in asked]
    if args.json:
        print_json([{"run_id": each.target, "evicted": not each.failed, "answer": each.answer} for each in answers])
    for answer in answers:
        if answer.failed or not args.json:
            print(f"{answer.target}: {answer.answer}", file=sys.stderr if answer.failed else sys.stdout)
    if any(answer.failed for answer in answers):
        sys.exit(1)


def _check_running(store: Store) -> None:
    """Raise TwinkleServerError if no server runs. A running server holds the lock of its data directory."""
    with suppress(DataDirInUseError), DirectoryLock(store.data_dir):
        raise TwinkleServerError(f"no server runs on {store.data_dir}, so there is nothing to evict")


async def _answer(store: Store, asked: OperatorRequest, deadline: float) -> OperatorRequest:
    while time.monotonic() < deadline:
        found = await store.operator_requests.get(asked.request_id)
        if found is not None and found.answer is not None:
            await store.operator_requests.withdraw(asked.request_id)
            return found
        await asyncio.sleep(_POLL_SECONDS)
    await store.operator_requests.withdraw(asked.request_id)
    raise TwinkleServerError(f"the server did not answer in time; {asked.target} may still be evicted if it had begun")
