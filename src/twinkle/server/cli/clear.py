"""``twinkle-server clear persistence``: begin again with an empty server that still has its keys and checkpoints."""

import argparse
import asyncio
import shutil
import sys
import time

from twinkle.errors import TwinkleServerError
from twinkle.server.cli.opening import config_of, server_options
from twinkle.server.config import ServerConfig
from twinkle.server.state import Store

__all__ = ["add_parser"]

_WHAT = "sessions, live adapters, futures and unnamed sampler versions; keys, checkpoints, usage and audit log stay"
_DIRECTORIES = ("snapshots", "samplers")  # whose records are cleared


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    actions = commands.add_parser("clear", help="forget what was under way").add_subparsers(
        required=True, metavar="WHAT"
    )
    parser = actions.add_parser("persistence", help=f"of a server that does not run: {_WHAT}")
    parser.set_defaults(run=_clear)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    server_options(parser)


def _clear(args: argparse.Namespace, _given: list[str]) -> None:
    config = config_of(args)
    if not args.yes and not _agreed(config):
        raise TwinkleServerError("nothing was cleared; --yes clears without asking")
    records = asyncio.run(_clear_state(config))
    mode = config.database_url.partition(":")[0]
    print(f"cleared {records} records of the state in {config.data_dir} (mode={mode})")


def _agreed(config: ServerConfig) -> bool:
    print(f"{config.data_dir}: forget {_WHAT}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _clear_state(config: ServerConfig) -> int:
    """Opened as a server opens it: where one runs, that is the error."""
    store = await Store.open(config.data_dir, config.database_url)
    try:
        records = await store.clear()
        await store.ops.prune(time.time(), 0, 0)  # the journal, of which nothing is needed
        for name in _DIRECTORIES:
            shutil.rmtree(config.data_dir / name, ignore_errors=True)
        return records
    finally:
        await store.close()
