"""The command line ``twinkle-server``: its parser, and the commands ``launch`` and ``stop``."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

import twinkle
from twinkle.environment import read_server_variables
from twinkle.errors import TwinkleError, TwinkleServerError
from twinkle.server.cli import config_commands, data_commands, key_commands, operator_commands, status_command
from twinkle.server.cli.config_commands import add_command, add_described, config_of
from twinkle.server.cli.launch import NOTHING_TO_SERVE, run_server, start_in_background
from twinkle.server.config.timings import DEFAULT_TIMINGS, Timings
from twinkle.server.runtime import process
from twinkle.server.runtime.generated_key import prepare_key_of

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
    is_short = given[0].startswith("-") and given[0] not in ("-h", "--help", "--version")
    given = ["launch", *given] if is_short else given
    args = parser.parse_args(given, argparse.Namespace(timings=timings))
    if is_short and args.config is None and read_server_variables().config is None:
        parser.error("-c/--config FILE: required without a COMMAND")
    return args, given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinkle-server", description="Post-training as a service.", epilog=_SHORT_FORM, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"twinkle-server {twinkle.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    launch = add_described(
        commands, "launch", "start a server; by default it serves the demo model on 127.0.0.1:8000", allow_abbrev=False
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
    status_command.add_parsers(commands)
    add_command(commands, "stop", _stop, "stop a server; it finishes running work first")
    operator_commands.add_parsers(commands)
    key_commands.add_parsers(commands)
    data_commands.add_parsers(commands)
    return parser


def _launch(args: argparse.Namespace, given: list[str]) -> None:
    config, notes = config_commands.requested_config(args)
    if args.server_type is not None:
        notes = [f"--server-type {args.server_type}: has no effect, one server speaks both protocols", *notes]
    if not config.applications:
        raise TwinkleServerError(NOTHING_TO_SERVE)
    if not args.no_wait:
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
