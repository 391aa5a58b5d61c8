"""The command ``status``: version, memory, disk, queue, models with their replicas, and damage of a running server."""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from twinkle.environment import read_server_variables
from twinkle.errors import TwinkleServerError
from twinkle.server.cli.config_commands import Commands, add_command, config_of
from twinkle.server.cli.launch import fetch_status
from twinkle.server.cli.tables import add_json, print_json, size
from twinkle.server.config import ServerConfig
from twinkle.server.runtime import process
from twinkle.server.runtime.process import ServerProcess
from twinkle.server.state.store import Store

# Lines that show a number of training and one of sampling. Rates cover about the last minute.
_SIDE_BY_SIDE = {
    "tokens": ("trained_tokens", "sampled_tokens"),
    "tokens/s": ("training_tokens_per_second", "sampling_tokens_per_second"),
    "busy seconds": ("training_seconds", "sampling_seconds"),
}
_SHOWN_OTHERWISE = {"replicas", *(key for keys in _SIDE_BY_SIDE.values() for key in keys)}


def add_parsers(commands: Commands) -> None:
    status = add_command(commands, "status", _status, "show the state of a running server")
    status.add_argument("--url", default=None, help="ask the server at this URL instead of that of -c or --data-dir")
    add_json(status)


def _status(args: argparse.Namespace, _given: list[str]) -> None:
    config = config_of(args)
    here = process.running(config.data_dir) if args.url is None else None
    applications = _applications(args, config, here)
    if applications and not args.json:
        _print_applications(applications)
    url = args.url or _address(args, config, here, deployed=bool(applications))
    status = fetch_status(url)
    facts: dict[str, Any] = {"url": url}
    if here is not None:
        facts["data_dir"], facts["data_dir_bytes"] = str(config.data_dir), _size(config.data_dir)
        facts["damage"] = asyncio.run(_damage(config))
    if args.json:
        print_json({**facts, **({"applications": applications} if applications else {}), **status})
    else:
        _print(facts, status)


def _address(args: argparse.Namespace, config: ServerConfig, here: ServerProcess | None, *, deployed: bool) -> str:
    """Return the URL of the server that the command is about; TwinkleServerError if that server does not run.

    Another server may listen on the configured address, so an answer there does not prove that it comes from the server
    of the data directory. Only a command that names no server asks whatever is on the default address.
    """
    if here is not None and here.url is None:
        raise TwinkleServerError(f"process {here.pid} on {config.data_dir} is starting or stopping")
    if here is not None and here.url is not None:
        return here.url
    http = config.http_options
    configured = process.url_of(http.host, http.port)
    names_none = args.config is None and args.data_dir is None and read_server_variables().config is None
    if deployed or names_none:
        return configured
    try:
        fetch_status(configured)
    except TwinkleServerError as error:
        raise TwinkleServerError(f"no server runs on {config.data_dir}, and {error}") from error
    raise TwinkleServerError(
        f"no server runs on {config.data_dir}; another one answers at {configured}, which --url {configured} shows"
    )


# --- on Ray -----------------------------------------------------------------------------------------------------------

Applications = dict[str, dict[str, Any]]


def _applications(args: argparse.Namespace, config: ServerConfig, here: ServerProcess | None) -> Applications:
    """Return what Serve reports about the applications of a server and about their deployments; {} if not on Ray."""
    if config.runtime != "ray" or args.url is not None or (here is not None and here.url is None):
        return {}
    from twinkle.server.runtime.ray.running import applications

    address = None if here is None else here.ray_address
    try:
        reported = applications(config, address)
    except TwinkleServerError as error:
        if address is None:
            raise
        print(f"twinkle-server: {error}", file=sys.stderr)  # the server itself may answer nevertheless
        return {}
    return {
        name: {
            "status": found.status.lower(),
            "deployments": {deployment: status.lower() for deployment, status in found.deployments.items()},
        }
        for name, found in reported.items()
    }


def _print_applications(applications: Applications) -> None:
    for name, found in applications.items():
        print(f"{name:18} {found['status']}")
        for deployment, status in found["deployments"].items():
            print(f"  {deployment:16} {status}")


# --- what the server reports ------------------------------------------------------------------------------------------


def _print(facts: Mapping[str, Any], status: Mapping[str, Any]) -> None:
    _line("server", facts["url"])
    for key in ("version", "runtime"):
        _line(key, status.get(key))
    _line("uptime_seconds", f"{status['uptime_seconds']:.0f}")
    memory, disk, queue = status.get("memory"), status.get("disk"), status.get("queue")
    if memory is not None:
        machine = f"{size(memory['machine_available_bytes'])} of {size(memory['machine_bytes'])}"
        _line("memory", f"{size(memory['process_bytes'])} in the server's process; {machine} of the machine available")
    if disk is not None:
        used = f"{size(facts['data_dir_bytes'])} in {facts['data_dir']}; " if "data_dir" in facts else ""
        _line("disk", f"{used}{size(disk['free_bytes'])} of {size(disk['total_bytes'])} free")
    if queue is not None:
        _line("queue", f"{queue['training_ops']} training ops, {queue['samples']} samples")
    for resource, numbers in status.get("budgets", {}).items():
        if resource != "disk" or disk is None:
            _line(resource, f"{size(numbers['used'])} of {size(numbers['limit'])}")
    for name, numbers in status["models"].items():
        _print_model(name, numbers)
    damage = facts.get("damage", {})
    if damage:
        _line("damaged", len(damage))
    for subject, message in damage.items():
        print(f"  {subject}: {message}")


def _print_model(name: str, numbers: Mapping[str, Any]) -> None:
    print(name)
    for key, value in numbers.items():
        if key.endswith("_bytes"):
            print(f"  {key.removesuffix('_bytes'):16} {size(value)}")
        elif key not in _SHOWN_OTHERWISE:
            print(f"  {key:16} {value}")
    if "replicas" in numbers:
        print(f"  {'replicas':16} {_replicas(numbers['replicas'])}")
    print(f"  {'':16} {'training':>14} {'sampling':>14}")
    for what, keys in _SIDE_BY_SIDE.items():
        training, sampling = (numbers.get(key, "-") for key in keys)
        print(f"  {what:16} {training:>14} {sampling:>14}")


def _replicas(replicas: Mapping[str, Any]) -> str:
    silent = f"; no answer from {', '.join(replicas['silent'])}" if replicas["silent"] else ""
    return f"{replicas['answering']} of {replicas['configured']} answering{silent}"


def _line(title: str, value: object) -> None:
    if value is not None:  # an older server does not report it
        print(f"{title:18} {value}")


# --- on the machine of the server -------------------------------------------------------------------------------------


def _size(directory: Path) -> int:
    """Return the bytes that the files under a directory take on disk; a file with several names counts once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # it was just deleted
                file = os.lstat(os.path.join(folder, name))
                if (file.st_dev, file.st_ino) not in seen:
                    seen.add((file.st_dev, file.st_ino))
                    total += file.st_blocks * 512
    return total


async def _damage(config: ServerConfig) -> dict[str, str]:
    """Return the damage on record in the state of the server that runs here, and its runs that failed by damage."""
    store = await Store.open(config.data_dir, config.database_url, lock=False)
    try:
        found = {each.subject: each.message for each in await store.damage.list()}
        for run in await store.runs.in_state("failed"):
            if run.note is not None and "damaged" in run.note:
                found.setdefault(f"run {run.run_id}", run.note)
        return found
    finally:
        await store.close()
