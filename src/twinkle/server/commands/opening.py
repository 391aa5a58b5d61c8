"""Which server a command is about: the one that the same options would start."""

import argparse
from pathlib import Path

from twinkle.server.config import ServerConfig, default_config, load_config
from twinkle.server.state import Store

__all__ = ["config_of", "open_store", "server_options"]


def server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", type=Path, default=None, metavar="FILE", help="the server's configuration")
    parser.add_argument("--data-dir", type=Path, default=None, help="the server's data, if not as configured")


def config_of(args: argparse.Namespace) -> ServerConfig:
    if args.config is not None:
        return load_config(args.config, data_dir=args.data_dir)[0]
    return default_config(data_dir=args.data_dir)


async def open_store(args: argparse.Namespace) -> Store:
    """Beside a server that may be running."""
    config = config_of(args)
    return await Store.open(config.data_dir, config.database_url, lock=False)
