"""``twinkle-server backup`` and ``restore``: a server's whole state, copied while it runs, and put back."""

import argparse
from pathlib import Path

from twinkle.errors import UnsupportedError
from twinkle.server.cli.opening import config_of, server_options
from twinkle.server.config import ServerConfig
from twinkle.server.state.backup import BackupSummary, back_up, restore

__all__ = ["add_parsers"]

_SQLITE = "sqlite:///"


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    backup = commands.add_parser("backup", help="copy the state of a server, which may be running, into a directory")
    backup.set_defaults(run=_backup)
    backup.add_argument("directory", type=Path, metavar="DIR", help="it must be empty, or not exist yet")
    back = commands.add_parser("restore", help="make a data directory from a backup")
    back.set_defaults(run=_restore)
    back.add_argument("directory", type=Path, metavar="DIR", help="the backup")
    for parser in (backup, back):
        server_options(parser)


def _backup(args: argparse.Namespace, _given: list[str]) -> None:
    config = config_of(args)
    summary = back_up(config.data_dir, _database(config), args.directory.absolute())
    print(f"{_words(summary)} in {args.directory}")


def _restore(args: argparse.Namespace, _given: list[str]) -> None:
    config = config_of(args)
    summary = restore(args.directory.absolute(), config.data_dir, _database(config))
    print(f"{_words(summary)} in {config.data_dir}; start the server as before")


def _database(config: ServerConfig) -> Path:
    url = config.database_url
    if not url.startswith(_SQLITE):
        raise UnsupportedError(
            "the state is on PostgreSQL, which has tools of its own: stop the server, copy the database with pg_dump "
            f"and {config.data_dir} with it, and put both back with pg_restore and a copy before a server starts"
        )
    return Path(url.removeprefix(_SQLITE))


def _words(summary: BackupSummary) -> str:
    return f"{summary.files} files, {summary.size_bytes / 1e6:.1f} MB"
