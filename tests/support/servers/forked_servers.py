"""Start servers, commands and scripts in a fraction of a second, as forks of a process that has imported everything.

Importing torch and the server takes seconds, and the tests start several hundred servers. So one process imports
everything once and then forks a child for each server. A child is a normal process: it can be killed, stopped and
waited for, and it has its own environment and log file.

    process = fork_server(["pass=0.5", "--", "launch", "-c", "config.yaml"], environment, log)   # like Popen
    done = run_forked(["keys", "list", "-c", "config.yaml"], environment)                         # like subprocess.run
    done = run_forked(["cookbook/rl/grpo.py", "--steps", "2"], environment)                       # a script, too
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

# Libraries read these variables when they are imported. A server that needs other values cannot be forked.
_READ_BY_IMPORTS = (
    "HF_",
    "LD_",
    "MKL_",
    "MODELSCOPE_",
    "OMP_",
    "PYTHON",
    "RAY_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
)
# Libraries set these variables in the process that runs the tests, some time after the import.
_SET_BY_LIBRARIES = {"TORCHINDUCTOR_CACHE_DIR"}
_POLL_SECONDS = 0.005


class ForkedProcess:
    """A server process with the part of ``subprocess.Popen`` that tests use. Its parent is the forking process."""

    def __init__(self, forker: "_Forker", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forker = forker

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forker.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"server process {self.pid}", timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_server(arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> ForkedProcess | None:
    """Start ``tuned_launch.py`` with these arguments. Return None if the environment requires fresh imports."""
    program = str(Path(__file__).with_name("tuned_launch.py"))
    return _fork([program, *arguments], environment, os.getcwd(), log, log)


def fork_script(
    command: Sequence[str | Path], environment: Mapping[str, str], log: IO[bytes]
) -> "ForkedProcess | subprocess.Popen[bytes]":
    """Start a Python script, whose path is the first part of the command; its output goes to ``log``."""
    parts = [str(part) for part in command]
    return _fork(parts, environment, os.getcwd(), log, log) or subprocess.Popen(
        [sys.executable, *parts], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
    )


def run_forked(
    arguments: Sequence[str | Path], environment: Mapping[str, str], cwd: Path | None = None, timeout: float = 240
) -> "subprocess.CompletedProcess[str]":
    """Run ``twinkle-server`` with these arguments, or a Python script if the first one is its path, to its end."""
    command = [str(argument) for argument in arguments]
    if not command or not command[0].endswith(".py"):
        command = [str(Path(__file__).with_name("tuned_launch.py")), "--", *command]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = _fork(command, environment, str(cwd or os.getcwd()), out, err)
        if process is None:
            process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, cwd=cwd
            )
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(command, code, *texts)


def _fork(
    command: Sequence[str], environment: Mapping[str, str], cwd: str, out: IO[bytes], err: IO[bytes]
) -> ForkedProcess | None:
    """Run a script in a new process, with the path of the script as the first part of the command."""
    if not _FORKERS:
        _FORKERS.append(_Forker(environment))
    forker = _FORKERS[0]
    if _read_by_imports(forker.environment) != _read_by_imports(environment):
        return None
    request = {"command": list(command), "environment": dict(environment), "cwd": cwd}
    return ForkedProcess(forker, forker.ask(request, [out, err]))


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_BY_IMPORTS) and name not in _SET_BY_LIBRARIES
    }


class _Forker:
    """The tests' connection to the forking process. A lock lets one thread at a time ask it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def ask(self, request: Mapping[str, Any], files: Sequence[IO[bytes]] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [file.fileno() for file in files])
            answer = self._socket.recv(2**16)
        if not answer:
            raise AssertionError("the process that forks servers has ended")
        return json.loads(answer)


_FORKERS: list[_Forker] = []  # empty, or the single forker of this test run


# --- in the forking process -------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> list[str] | None:
    """Fork a child for each request. In the child return its command; return None when the tests have ended."""
    codes: dict[int, int] = {}
    while True:
        message, files, _, _ = socket.recv_fds(connection, 2**20, 2)
        if not message:
            return None
        request = json.loads(message)
        if "poll" in request:
            pid = request["poll"]
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            connection.send(json.dumps(codes.get(pid)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request, files)
            return list(request["command"])
        for file in files:
            os.close(file)
        connection.send(json.dumps(pid).encode())


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Take over the environment, the working directory and the two output files of the requested process."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _import_everything() -> None:
    """Import what servers with the mock and with small models need, and exclude it from garbage collection."""

    import twinkle.model.trainer.trainer
    import twinkle.sampler.torch_sampler.sampler
    import twinkle.server.cli.command_line
    import twinkle.server.cli.launch
    import twinkle.server.processors.service
    import twinkle.server.runtime.embedded  # noqa: F401

    with suppress(ImportError):  # the tinker SDK, for scripts; not every environment has it
        import tinker  # noqa: F401

    gc.collect()
    gc.freeze()


def _end(code: int) -> NoReturn:
    """End a child as the interpreter does, but without freeing its objects one by one.

    That takes half a second in a child, because it copies memory that it shares with the forking process. As always,
    threads that are no daemons are waited for, functions that were registered for the end run, and output is written.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls; it also ends thread pools
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    from tests.support.servers.tuned_launch import end_with_parent

    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the tests, which end this process
    _import_everything()
    command = _serve(socket.socket(fileno=int(sys.argv[1])))
    if command is not None:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))  # as Python does for the script of a new process
        code = 0
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                raise
            code = end.code or 0
        _end(code)
