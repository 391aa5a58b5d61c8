"""``twinkle-server usage``: tokens, steps and storage by tenant and day."""

import argparse
import asyncio
import json
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta

from twinkle.server.cli.opening import open_store, server_options
from twinkle.server.state import DailyUsage

__all__ = ["add_parser"]

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
_TEXT = ("day", "tenant")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("usage", help="tokens, steps and storage by tenant and day (UTC)")
    parser.set_defaults(run=_usage)
    parser.add_argument("--tenant", default=None, help="of this tenant alone")
    parser.add_argument("--since", type=_day, default=None, metavar="DAY", help="first day, default 30 days ago")
    parser.add_argument("--until", type=_day, default=None, metavar="DAY", help="last day, default today")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    server_options(parser)


def _usage(args: argparse.Namespace, _given: list[str]) -> None:
    today = datetime.now(UTC).date()
    until: date = args.until or today
    since: date = args.since or until - timedelta(days=30)
    rows = [_row(each) for each in asyncio.run(_read(args, since, until))]
    if args.format == "json":
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


async def _read(args: argparse.Namespace, since: date, until: date) -> tuple[DailyUsage, ...]:
    store = await open_store(args)
    try:
        after = until + timedelta(days=1)
        return await store.usage.list(since.isoformat(), after.isoformat(), args.tenant)
    finally:
        await store.close()


def _row(usage: DailyUsage) -> dict[str, object]:
    return {
        "day": usage.day,
        "tenant": usage.tenant_id,
        **asdict(usage.counts),
        "storage_bytes": usage.storage_bytes,
    }


def _print_table(rows: list[dict[str, object]]) -> None:
    table = [list(_COLUMNS.values()), *([str(row[name]) for name in _COLUMNS] for row in rows)]
    widths = [max(len(line[index]) for line in table) for index in range(len(_COLUMNS))]
    for line in table:
        cells = zip(_COLUMNS, line, widths, strict=True)
        print("  ".join(cell.ljust(width) if name in _TEXT else cell.rjust(width) for name, cell, width in cells))


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a day such as 2026-01-31") from None
