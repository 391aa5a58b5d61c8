"""``twinkle-server check-config`` and ``print-config``: what is wrong with a configuration, and what is in effect."""

import argparse
import json
import sys
from pathlib import Path

from twinkle.environment import read_server_variables
from twinkle.errors import ConfigError, InvalidInputError, TwinkleError
from twinkle.server.cli.opening import config_file
from twinkle.server.config import DEFAULT_MODEL, ServerConfig, describe, load_config
from twinkle.server.config.messages import without_passwords

__all__ = ["add_parsers", "config_options", "requested_config"]

_BAD_CONFIGURATION = 2


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = commands.add_parser("check-config", help="say what is wrong with a config file, and what older keys became")
    check.set_defaults(run=_check)
    check.add_argument("file", type=Path, nargs="?", default=None)
    check.add_argument("-c", "--config", type=Path, default=None, metavar="FILE", help="the same")
    show = commands.add_parser("print-config", help="print the configuration in effect, by default as commented YAML")
    show.set_defaults(run=_print)
    config_options(show)
    show.add_argument("--format", choices=("yaml", "json"), default=None, help="default yaml, which loads again")


def config_options(parser: argparse.ArgumentParser) -> None:
    """What makes up a configuration on the command line."""
    parser.add_argument(
        "-c", "--config", type=Path, default=None, metavar="FILE", help="YAML, default TWINKLE_SERVER_CONFIG"
    )
    parser.add_argument("--model", default=None, metavar="ID", help=f"model to serve, default {DEFAULT_MODEL}")
    parser.add_argument("--host", default=None, help="default 127.0.0.1")
    parser.add_argument("--port", type=int, default=None, help="default 8000; 0 takes any free one")
    parser.add_argument("--data-dir", type=Path, default=None, help="default ~/.local/share/twinkle")
    parser.add_argument(
        "--namespace", default=None, help="Ray namespace, default TWINKLE_RAY_NAMESPACE; none on the embedded runtime"
    )


def requested_config(args: argparse.Namespace) -> tuple[ServerConfig, list[str]]:
    """The file's configuration, or the default one, with what the command line says on top."""
    return load_config(
        config_file(args),
        model=args.model,
        host=args.host,
        port=args.port,
        data_dir=args.data_dir,
        ray_namespace=args.namespace or read_server_variables().ray_namespace,
    )


def _check(args: argparse.Namespace, _given: list[str]) -> None:
    """``ok`` alone on standard output, for scripts; notes are for people."""
    try:
        file = args.file if args.config is None else args.config
        if args.file is not None and args.config not in (None, args.file):
            raise InvalidInputError("FILE", f"{args.file} and {args.config}", "one file at a time")
        file = file or read_server_variables().config
        if file is None:
            raise InvalidInputError("FILE", "none", "a configuration, by -c FILE or TWINKLE_SERVER_CONFIG")
        _, notes = load_config(file)
    except (TwinkleError, OSError) as error:
        print(f"error: {_reason(error)}", file=sys.stderr)
        sys.exit(_BAD_CONFIGURATION)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print("ok")


def _reason(error: Exception) -> str:
    """Problems of a file are a line each."""
    return f"invalid configuration\n{error}" if isinstance(error, ConfigError) else str(error)


def _print(args: argparse.Namespace, _given: list[str]) -> None:
    config, notes = requested_config(args)
    if (args.format or read_server_variables().print_format) == "json":
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        print(json.dumps(_shown(config.to_yaml_dict()), indent=2, sort_keys=True))
        return
    for note in notes:
        print(f"# note: {note}")
    print(describe(config))


def _shown(value: object) -> object:
    """Without passwords."""
    if isinstance(value, dict):
        return {key: _shown(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return without_passwords(value) if isinstance(value, str) else value
