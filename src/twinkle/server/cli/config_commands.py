"""Parts that commands share: which configuration a command uses, and how it opens the state of its server.

The commands about configurations, ``check-config`` and ``print-config``, are here too.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from twinkle.environment import listed_devices, read_server_variables
from twinkle.errors import ConfigError, InvalidInputError, TwinkleError, TwinkleServerError
from twinkle.infra.platform import GPU
from twinkle.server.config import DEFAULT_MODEL, ServerConfig, describe, load_config
from twinkle.server.config.demand import Machine, machine_notes
from twinkle.server.config.meshes import mesh_notes
from twinkle.server.config.messages import change_texts, without_passwords
from twinkle.server.state.store import Store
from twinkle.utils.requirements import exists

_BAD_CONFIGURATION = 2

Command = Callable[[argparse.Namespace, list[str]], None]  # the parsed arguments, and all arguments as given
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


# --- which configuration a command uses -------------------------------------------------------------------------------


def add_described(commands: Commands, name: str, about: str, *, allow_abbrev: bool = True) -> argparse.ArgumentParser:
    """Add a command. ``about`` is its line in the list of commands, and the first sentence of its own --help."""
    return commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=allow_abbrev
    )


def add_command(commands: Commands, name: str, run: Command, about: str) -> argparse.ArgumentParser:
    """Add a command about a server that was started with the same -c and --data-dir; ``about`` is its help."""
    parser = add_described(commands, name, about)
    parser.set_defaults(run=run)
    parser.add_argument("-c", "--config", type=Path, default=None, metavar="FILE", help="configuration of the server")
    parser.add_argument("--data-dir", type=Path, default=None, help="data directory, instead of the configured one")
    return parser


def config_of(args: argparse.Namespace) -> ServerConfig:
    """Return the configuration of the server that a command is about."""
    return load_config(_config_file(args), data_dir=args.data_dir)[0]


def on_store(work: Callable[[argparse.Namespace, Store], Awaitable[None]]) -> Command:
    """Return a command that opens the state of a server and runs ``work`` on it. The server may run meanwhile.

    TwinkleServerError if no server has kept a state there: a mistyped directory must not look like an idle server.
    """
    return _on_store(work, may_create=False)


def on_new_store(work: Callable[[argparse.Namespace, Store], Awaitable[None]]) -> Command:
    """Return the same as :func:`on_store`, except that the command creates the state where there is none."""
    return _on_store(work, may_create=True)


def _on_store(work: Callable[[argparse.Namespace, Store], Awaitable[None]], *, may_create: bool) -> Command:
    async def open_and_work(args: argparse.Namespace) -> None:
        config = config_of(args)
        kept = [config.data_dir / name for name in ("secret", "copies")]  # every state has them, on any database
        if not may_create and not any(path.exists() for path in kept):
            raise TwinkleServerError(
                f"no server has kept its state in {config.data_dir}; -c or --data-dir chooses another one"
            )
        store = await Store.open(config.data_dir, config.database_url, lock=False)
        try:
            await work(args, store)
        finally:
            await store.close()

    return lambda args, _given: asyncio.run(open_and_work(args))


def config_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that make up a configuration on the command line."""
    parser.add_argument(
        "-c", "--config", type=Path, default=None, metavar="FILE", help="YAML file, default TWINKLE_SERVER_CONFIG"
    )
    parser.add_argument("--model", default=None, metavar="ID", help=f"model to serve, default {DEFAULT_MODEL}")
    parser.add_argument("--host", default=None, help="address to listen on, default 127.0.0.1")
    parser.add_argument("--port", type=int, default=None, help="port to listen on, default 8000; 0 selects a free port")
    parser.add_argument("--data-dir", type=Path, default=None, help="data directory, default ~/.local/share/twinkle")
    parser.add_argument(
        "--namespace", default=None, help="Ray namespace, default TWINKLE_RAY_NAMESPACE; unused by embedded servers"
    )


def requested_config(args: argparse.Namespace) -> tuple[ServerConfig, list[str]]:
    """Return the configuration, and notes on it: the file's or the default one, changed by command line options.

    Without ``--namespace``, TWINKLE_RAY_NAMESPACE replaces the file's Ray namespace.
    """
    return load_config(
        _config_file(args),
        model=args.model,
        host=args.host,
        port=args.port,
        data_dir=args.data_dir,
        ray_namespace=args.namespace or read_server_variables().ray_namespace,
    )


def _config_file(args: argparse.Namespace) -> Path | None:
    """Return the file that -c names, else TWINKLE_SERVER_CONFIG; None: the default configuration applies."""
    given: Path | None = args.config
    return given or read_server_variables().config


# --- check-config and print-config ------------------------------------------------------------------------------------


def add_parsers(commands: Commands) -> None:
    check = add_described(commands, "check-config", "check a configuration file and show how older keys are converted")
    check.set_defaults(run=_check)
    check.add_argument("file", type=Path, nargs="?", default=None, help="configuration file")
    check.add_argument("-c", "--config", type=Path, default=None, metavar="FILE", help="configuration file")
    show = add_described(commands, "print-config", "print the configuration in effect, by default as commented YAML")
    show.set_defaults(run=_print)
    config_options(show)
    show.add_argument("--format", choices=("yaml", "json"), default=None, help="default yaml, which a server can load")


def _check(args: argparse.Namespace, _given: list[str]) -> None:
    """Check a configuration. Only ``ok`` is printed to standard output, for scripts; the rest to standard error."""
    try:
        if args.file is not None and args.config not in (None, args.file):
            raise InvalidInputError("FILE", f"{args.file} and {args.config}", "one file at a time")
        file = args.file or _config_file(args)
        if file is None:
            raise InvalidInputError("FILE", "none", "a configuration, by -c FILE or TWINKLE_SERVER_CONFIG")
        config, notes = load_config(file)
    except (TwinkleError, OSError) as error:
        # A ConfigError has one line for each problem of the file; they follow this one.
        reason = f"invalid configuration\n{error}" if isinstance(error, ConfigError) else str(error)
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(_BAD_CONFIGURATION)
    here = machine_notes(config.applications, config.runtime, this_machine())
    for note in [*notes, *mesh_notes(config.applications), *here]:
        print(f"note: {note}", file=sys.stderr)
    print("ok")


def this_machine() -> Machine:
    """Return what this machine has. GPUs are counted as CUDA does: those that CUDA_VISIBLE_DEVICES names, else all."""
    devices = [entry for entry in Path("/dev").glob("nvidia*") if entry.name.removeprefix("nvidia").isdigit()]
    listed = listed_devices(GPU.visible_variable)
    gpus = len(devices) if listed is None else min(len(devices), len(listed))
    return Machine(os.cpu_count() or 1, gpus, exists("ray"))


def _print(args: argparse.Namespace, _given: list[str]) -> None:
    config, notes = requested_config(args)
    if (args.format or read_server_variables().print_format) == "json":
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        print(json.dumps(change_texts(config.to_yaml_dict(), without_passwords), indent=2, sort_keys=True))
        return
    for note in notes:
        print(f"# note: {note}")
    print(describe(config))
