"""Check the commands of a shell block without running them: each program is known, and its arguments exist.

Commands of this repository are checked against our own parsers, the Makefile, pyproject.toml and the files. Of other
programs only the subcommands are known.
"""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.paths import ROOT
from twinkle.server.app import ROUTES
from twinkle.server.cli import command_line
from twinkle.server.http.routes import NO_ROUTE
from twinkle_client.auto import cli as auto_command

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Our distributions: the one that this file describes, and those that it requires.
_EXTRAS: Mapping[str, list[str]] = _PROJECT["optional-dependencies"]
_REQUIRED = [*_PROJECT["dependencies"], *(requirement for extra in _EXTRAS.values() for requirement in extra)]
_OWN_NAMES = {".", _PROJECT["name"], *re.findall(r"\btwinkle[\w-]*", " ".join(_REQUIRED))}
_TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OPERATORS = ("&&", "||", "|", ";", "&")
# Subcommands of other programs that pages may name; an empty tuple: any arguments.
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "createdb": (),
    "docker": ("build", "run", "exec", "compose", "logs", "stop"),
    "install": (),
    "kubectl": ("apply", "create", "delete", "exec", "get", "logs", "port-forward", "rollout", "wait"),
    "ray": ("start", "status", "stop"),
    "systemctl": ("enable", "reload", "restart", "start", "status", "stop"),
    "systemd-sysusers": (),
    "tinker": ("checkpoint", "run", "version"),
    "export": (),
    "cd": (),
    "git": ("clone", "checkout", "tag", "push"),
}


class WrongCommandError(AssertionError):
    """A command that does not exist, or one with arguments that it does not have."""


def commands_in(text: str, language: str) -> Iterator[list[str]]:
    """Yield the commands of a block as words. In a ``console`` block they follow a prompt, and the rest is output."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        prompt = re.match(r"[$#] ", line)
        if language == "console" and prompt is None:
            continue
        words: list[str] = []
        lexer = shlex.shlex(line[2:] if prompt else line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if word not in _OPERATORS:
                words.append(word)
            elif words:
                yield words
                words = []


def check(words: Sequence[str]) -> None:
    """Raise WrongCommandError if the command cannot be run as it is written."""
    words = list(words)
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    if not words:
        return
    program, arguments = Path(words[0]).name, words[1:]
    if program == "sudo":
        check(arguments[2:] if arguments[0] == "-u" else arguments)
    elif program == "docker" and arguments[0] == "exec":
        check(arguments[2:])
    elif program in _OURS:
        _OURS[program](words[0], arguments)
    elif program in _OTHERS:
        known = _OTHERS[program]
        if known and arguments[0] not in known:
            raise WrongCommandError(f"{program} {arguments[0]}: allowed: {', '.join(known)}")
    elif words[0].endswith(".sh"):
        _existing(words[0])
        _check_server("", ["launch", *arguments])
    else:
        raise WrongCommandError(f"{words[0]}: not a known program")


def _check_server(_program: str, arguments: Sequence[str]) -> None:
    try:
        command_line._parsed(command_line._parser(), list(arguments), command_line.DEFAULT_TIMINGS)
    except SystemExit:
        raise WrongCommandError(f"twinkle-server {' '.join(arguments)}: refused by its parser") from None


def _check_auto(_program: str, arguments: Sequence[str]) -> None:
    try:
        auto_command._parser().parse_args(list(arguments))
    except SystemExit:
        raise WrongCommandError(f"twinkle-auto {' '.join(arguments)}: refused by its parser") from None


def _check_make(_program: str, arguments: Sequence[str]) -> None:
    targets = {argument for argument in arguments if not _ASSIGNMENT.fullmatch(argument)}
    if not targets <= _TARGETS:
        raise WrongCommandError(f"make {' '.join(targets - _TARGETS)}: not a target of the Makefile")


def _check_python(_program: str, arguments: Sequence[str]) -> None:
    if arguments[0] == "-m":
        module, *rest = arguments[1:]
        if module == "twinkle.server":
            _check_server("", rest)
        elif module == "pip":
            _check_pip("", rest)
        elif module != "venv":
            raise WrongCommandError(f"python -m {module}: allowed: twinkle.server, pip, venv")
        return
    _check_script(arguments)


def _check_script(words: Sequence[str]) -> None:
    """Check that a script exists and has the options. A script that runs another one passes its arguments on."""
    script, *arguments = words
    if script == "train.py":  # the reader's own
        return
    source = _existing(script).read_text()
    if "twinkle.server.cli import main" in source:
        _check_server("", ["launch", *arguments])
        return
    for option in (argument.partition("=")[0] for argument in arguments if argument.startswith("-")):
        if f'"{option}"' not in source:
            raise WrongCommandError(f"{script} {option}: no such option")


def _check_torchrun(_program: str, arguments: Sequence[str]) -> None:
    if arguments[0] != "--nproc-per-node" or not arguments[1].isdigit():
        raise WrongCommandError(f"torchrun {' '.join(arguments)}: allowed: --nproc-per-node N SCRIPT")
    _check_script(arguments[2:])


def _check_pip(_program: str, arguments: Sequence[str]) -> None:
    if arguments[0] not in ("install", "download"):
        raise WrongCommandError(f"pip {arguments[0]}: allowed: install, download")
    for requirement in (argument for argument in arguments[1:] if not argument.startswith("-")):
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()  # type: ignore[union-attr]
        if name in _OWN_NAMES:
            unknown = {*filter(None, (extras or "").split(","))} - _EXTRAS.keys()
            if unknown:
                raise WrongCommandError(f"pip install {requirement}: no extra {', '.join(unknown)} in pyproject.toml")
        elif name.startswith("twinkle"):
            raise WrongCommandError(f"pip install {requirement}: this project's distributions: {', '.join(_OWN_NAMES)}")


def _check_pytest(_program: str, arguments: Sequence[str]) -> None:
    for argument in arguments:
        if not argument.startswith("-"):
            _existing(argument.partition("::")[0])


def _check_curl(_program: str, arguments: Sequence[str]) -> None:
    for argument in arguments:
        found = re.match(r"https?://[^/]+(/[^?]*)?", argument)
        if found and all(ROUTES.find(method, found[1] or "/")[0] is NO_ROUTE for method in ("GET", "POST")):
            raise WrongCommandError(f"curl {argument}: the server has no such route")


def _existing(path: str) -> Path:
    if not (ROOT / path).exists():
        raise WrongCommandError(f"{path}: not in the repository")
    return ROOT / path


_OURS: Mapping[str, Callable[[str, Sequence[str]], None]] = {
    "twinkle-auto": _check_auto,
    "twinkle-server": _check_server,
    "make": _check_make,
    "python": _check_python,
    "python3": _check_python,
    "python3.12": _check_python,
    "torchrun": _check_torchrun,
    "pip": _check_pip,
    "pytest": _check_pytest,
    "curl": _check_curl,
}
