"""``twinkle-server evict``: take adapters off the device now; their last state is kept as a checkpoint.

The request goes through the server's database, which only operators can write to; the server answers when it next keeps
house, within about fifteen seconds.
"""

import argparse
import asyncio
import sys
import time

from filelock import FileLock, Timeout

from twinkle.errors import NotFoundError, TwinkleServerError
from twinkle.server.cli.opening import open_store, server_options
from twinkle.server.state import EVICT, OperatorRequest, Store

__all__ = ["add_parser"]

_POLL_SECONDS = 0.2


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("evict", help="take adapters off the device of a running server, keeping their state")
    parser.set_defaults(run=_evict)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("run_id", nargs="?", default=None, metavar="RUN_ID", help="one adapter")
    target.add_argument("--tenant", default=None, help="all adapters of this tenant")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="how long to wait, default 120")
    server_options(parser)


def _evict(args: argparse.Namespace, _given: list[str]) -> None:
    answers = asyncio.run(_ask(args))
    for answer in answers:
        print(f"{answer.target}: {answer.answer}", file=sys.stderr if answer.failed else sys.stdout)
    if any(answer.failed for answer in answers):
        sys.exit(1)


async def _ask(args: argparse.Namespace) -> list[OperatorRequest]:
    store = await open_store(args)
    try:
        _check_running(store)
        run_ids = [args.run_id] if args.tenant is None else await _live_runs(store, args.tenant)
        asked = [await store.operator_requests.ask(EVICT, run_id, time.time()) for run_id in run_ids]
        deadline = time.monotonic() + args.timeout
        return [await _answer(store, each, deadline) for each in asked]
    finally:
        await store.close()


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
