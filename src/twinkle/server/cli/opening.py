"""Which server a command is about: the one that the same options would start."""

import argparse
from pathlib import Path

from twinkle.environment import read_server_variables
from twinkle.server.config import ServerConfig, load_config
from twinkle.server.state import Store

__all__ = ["config_file", "config_of", "open_store", "server_options"]


def server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", type=Path, default=None, metavar="FILE", help="the server's configuration")
    parser.add_argument("--data-dir", type=Path, default=None, help="the server's data, if not as configured")


def config_file(args: argparse.Namespace) -> Path | None:
    """What -c names, else the environment; None: the default configuration is meant."""
    given: Path | None = args.config
    return given or read_server_variables().config


def config_of(args: argparse.Namespace) -> ServerConfig:
    return load_config(config_file(args), data_dir=args.data_dir)[0]


async def open_store(args: argparse.Namespace) -> Store:
    """Beside a server that may be running."""
    config = config_of(args)
    return await Store.open(config.data_dir, config.database_url, lock=False)
