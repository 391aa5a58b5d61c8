"""The command line ``twinkle-server``: its parser, and the commands ``launch``, ``status`` and ``stop``."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from twinkle.environment import read_server_variables
from twinkle.errors import TwinkleError, TwinkleServerError
from twinkle.server.cli import config_commands, data_commands, operator_commands
from twinkle.server.cli.config_commands import add_command, config_of, on_store
from twinkle.server.cli.launch import fetch_status, run_server, start_in_background
from twinkle.server.config import ServerConfig
from twinkle.server.config.timings import DEFAULT_TIMINGS, Timings
from twinkle.server.runtime import process
from twinkle.server.runtime.generated_key import prepare_key_of
from twinkle.server.state.store import Store

# Lines of `status` that show a number of training and one of sampling. Rates cover about the last minute.
_SIDE_BY_SIDE = {
    "tokens": ("trained_tokens", "sampled_tokens"),
    "tokens/s": ("training_tokens_per_second", "sampling_tokens_per_second"),
    "busy seconds": ("training_seconds", "sampling_seconds"),
}
_WRONG_USE = 2
_INTERRUPTED = 130
_LOG_LEVELS = ("debug", "info", "warning", "error")
_SHORT_FORM = "twinkle-server --config FILE [OPTION] is the same as twinkle-server launch --config FILE [OPTION]."


def main(arguments: Sequence[str] | None = None, timings: Timings = DEFAULT_TIMINGS) -> int:
    """Run one command and return its exit code: 0 for success, 1 for an error, 2 for wrong use, 130 for Ctrl-C.

    ``check-data`` also ends with 1 if it finds damage, ``check-config`` with 2 for a bad configuration.
    ``timings`` are for the server that ``launch`` starts in this process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    if not given:
        parser.print_help(sys.stderr)
        return _WRONG_USE
    try:
        args, given = _parsed(parser, given, timings)
        args.run(args, given)
    except SystemExit as end:  # raised by argparse, and by commands that have already printed what is wrong
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (TwinkleError, OSError) as error:
        print(f"twinkle-server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _parsed(
    parser: argparse.ArgumentParser, given: list[str], timings: Timings
) -> tuple[argparse.Namespace, list[str]]:
    """Return the parsed arguments, and the arguments with the name of the command in front.

    Options without a command are those of ``launch``. In this form a configuration is required, so that a mistyped
    option does not start a server with the demo model.
    """
    is_short = given[0].startswith("-") and given[0] not in ("-h", "--help")
    given = ["launch", *given] if is_short else given
    args = parser.parse_args(given, argparse.Namespace(timings=timings))
    if is_short and args.config is None and read_server_variables().config is None:
        parser.error("-c/--config FILE: required without a COMMAND")
    return args, given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinkle-server", description="Post-training as a service.", epilog=_SHORT_FORM, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    launch = commands.add_parser(
        "launch", allow_abbrev=False, help="start a server; by default it serves the demo model on 127.0.0.1:8000"
    )
    launch.set_defaults(run=_launch)
    config_commands.config_options(launch)
    launch.add_argument(
        "--log-level",
        type=str.lower,
        choices=_LOG_LEVELS,
        default=None,
        help="in lower or upper case; default: the configured level, else info",
    )
    launch.add_argument(
        "--log-format", choices=("text", "json"), default=None, help="default: the configured format, else text"
    )
    launch.add_argument("--no-wait", action="store_true", help="return once the server is ready, and leave it running")
    launch.add_argument(
        "-t", "--server-type", choices=("tinker", "twinkle"), help="has no effect: every server speaks both protocols"
    )

    config_commands.add_parsers(commands)
    status = add_command(commands, "status", _status, "show the state of a running server")
    status.add_argument(
        "--url", default=None, help="default: the server of the data directory, else http://127.0.0.1:8000"
    )
    add_command(commands, "stop", _stop, "stop a server; it finishes running work first")
    operator_commands.add_parsers(commands)
    data_commands.add_parsers(commands)
    return parser


def _launch(args: argparse.Namespace, given: list[str]) -> None:
    config, notes = config_commands.requested_config(args)
    if args.server_type is not None:
        notes = [f"--server-type {args.server_type}: has no effect, one server speaks both protocols", *notes]
    if not args.no_wait or not config.applications:
        run_server(config.with_timings(args.timings), notes, args.log_level, args.log_format)
        return
    log_file = config.data_dir / "server.log"
    arguments = [argument for argument in given[1:] if argument != "--no-wait"]
    pid, url = start_in_background(arguments, log_file)
    print(f"serving on {url} as process {pid}; log in {log_file}")
    for line in asyncio.run(prepare_key_of(config)):  # where the generated key is: the server's output is in its log
        print(line)


def _stop(args: argparse.Namespace, _given: list[str]) -> None:
    config = config_of(args)
    stopped = process.stop(config.data_dir)
    if not stopped and config.runtime == "ray":
        from twinkle.server.runtime.ray.running import take_down

        stopped = take_down(config)
    if not stopped:
        raise TwinkleServerError(f"no server runs on {config.data_dir}; -c or --data-dir chooses another one")
    print("stopped")


def _status(args: argparse.Namespace, _given: list[str]) -> None:
    config = config_of(args)
    here = process.running(config.data_dir)
    if config.runtime == "ray" and (here is None or here.url is not None):
        _print_applications(config, None if here is None else here.ray_address)
    if here is not None and here.url is None and args.url is None:
        raise TwinkleServerError(f"process {here.pid} on {config.data_dir} is starting or stopping")
    status = fetch_status(args.url or (here and here.url) or "http://127.0.0.1:8000")
    models, budgets = status.pop("models"), status.pop("budgets", {})
    assert isinstance(models, dict)
    assert isinstance(budgets, dict)
    for key, value in status.items():
        print(f"{key:18} {value:.0f}" if isinstance(value, float) else f"{key:18} {value}")
    for resource, numbers in budgets.items():
        print(f"{resource:18} {numbers['used'] / 2**20:.0f} of {numbers['limit'] / 2**20:.0f} MiB")
    for name, numbers in models.items():
        print(name)
        beside = {key for keys in _SIDE_BY_SIDE.values() for key in keys}
        for key, value in numbers.items():
            if key not in beside:
                print(f"  {key:16} {value}")
        print(f"  {'':16} {'training':>14} {'sampling':>14}")
        for what, keys in _SIDE_BY_SIDE.items():
            training, sampling = (numbers.get(key, "-") for key in keys)
            print(f"  {what:16} {training:>14} {sampling:>14}")
    if here is not None:
        _print_damage(args, [])


def _print_applications(config: ServerConfig, address: str | None) -> None:
    """Print what Serve reports about the applications of a server and about their deployments."""
    from twinkle.server.runtime.ray.running import applications

    try:
        reported = applications(config, address)
    except TwinkleServerError as error:
        if address is None:
            raise
        print(f"twinkle-server: {error}", file=sys.stderr)  # the server itself may answer nevertheless
        return
    for name, found in reported.items():
        print(f"{name:18} {found.status.lower()}")
        for deployment, status in found.deployments.items():
            print(f"  {deployment:16} {status.lower()}")


@on_store
async def _print_damage(_args: argparse.Namespace, store: Store) -> None:
    """Print the damage on record in the state of the server that runs here, and its runs that failed by damage."""
    found = {each.subject: each.message for each in await store.damage.list()}
    for run in await store.runs.in_state("failed"):
        if run.note is not None and "damaged" in run.note:
            found.setdefault(f"run {run.run_id}", run.note)
    if found:
        print(f"{'damaged':18} {len(found)}")
    for subject, message in found.items():
        print(f"  {subject}: {message}")
