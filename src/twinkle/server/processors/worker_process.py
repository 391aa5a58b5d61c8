"""The server's side of a worker: a process that answers one request at a time and may end at any moment."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from twinkle.environment import variables_with_own_caches
from twinkle.errors import NotFoundError
from twinkle.server.processors.messages import Frame, FrameTooLargeError, Settings, pack, receive_frame

_READ_AHEAD = 2**20
_AROUND_AN_ANSWER = 2**16  # bytes of JSON around a result, and of messages
_DISK_CHECK_SECONDS = 2.0
DISK_LIMIT = "limits.processor_disk_gib"


class WorkerEndedError(NotFoundError):
    """The worker process has ended, and all objects in it are gone."""

    def __init__(self, why: str) -> None:
        super().__init__("processor", why)
        self.args = (f"the worker of this session ended ({why}): create the dataset, and what else you need, again",)


class WorkerProcess:
    """A running worker process. Make it with :meth:`start`. Its methods are called on the event loop."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, settings: Settings) -> None:
        self._process = process
        self._most_bytes = settings.answer_bytes + _AROUND_AN_ANSWER
        self._disk_bytes = settings.disk_bytes
        self._directory = directory
        self._turn = asyncio.Lock()
        self._why: str | None = None
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, settings: Settings, directory: Path, ended: Callable[["WorkerProcess"], None]
    ) -> "WorkerProcess":
        """Start a worker with a new directory under ``directory``.

        There it has a cache, for its downloads and temporary files, and an empty working directory, in which no
        relative name means a file. A worker whose directory outgrows ``settings.disk_bytes`` is killed. ``ended`` is
        called once, when the process is gone for whatever reason.
        """
        own = Path(tempfile.mkdtemp(dir=directory))
        (own / "cache").mkdir(mode=0o700)
        (own / "empty").mkdir(mode=0o700)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing is imported from the working directory
            "-m",
            "twinkle.server.processors.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=own / "empty",
            env=variables_with_own_caches(own / "cache"),
            start_new_session=True,  # Ctrl-C is for the server, which ends its workers itself
            limit=_READ_AHEAD,
        )
        worker = cls(process, own, settings)
        worker._watching = asyncio.create_task(worker._watch(ended))
        assert process.stdin is not None
        process.stdin.writelines(pack(asdict(replace(settings, cache_dir=str(own / "cache")))))
        return worker

    @property
    def why(self) -> str:
        """Return why the process ended: the reason given to :meth:`kill`, else its signal or exit status."""
        if self._why is not None:
            return self._why
        code = self._process.returncode
        if code is not None and code < 0:
            return f"{signal.Signals(-code).name}; it may have needed more memory than limits.processor_memory_gib"
        return f"exit status {code}"

    async def ask(self, header: Mapping[str, Any], body: bytes, seconds: float) -> Frame:
        """Send a request and return the answer; WorkerEndedError if the worker ends before it has answered.

        Requests take turns. One that takes more than ``seconds`` of its own turn ends the worker.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn:
            try:
                self._process.stdin.writelines(pack(header, body))
                async with asyncio.timeout(seconds):
                    await self._process.stdin.drain()
                    return await receive_frame(self._process.stdout, self._most_bytes)
            except TimeoutError:
                await self.end(f"a call took longer than {seconds:g} s")
            except FrameTooLargeError as error:
                await self.end(str(error))
            except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):
                # RuntimeError: what uvloop raises for a pipe that is already closed
                await self._process.wait()
        raise WorkerEndedError(self.why)

    async def end(self, why: str) -> None:
        """Kill the process and wait until it is gone and its directory is deleted."""
        self.kill(why)
        if self._watching is not None:
            await asyncio.shield(self._watching)

    def kill(self, why: str) -> None:
        """Kill the process without waiting. Pending requests fail with the reason ``why``."""
        if self._process.returncode is None:
            self._why = self._why or why
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _watch(self, ended: Callable[["WorkerProcess"], None]) -> None:
        checking = asyncio.create_task(self._check_disk())
        await self._process.wait()
        checking.cancel()
        ended(self)
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _check_disk(self) -> None:
        """Kill the worker if its directory grows beyond the limit: libraries write there without asking."""
        while True:
            await asyncio.sleep(_DISK_CHECK_SECONDS)
            used = await asyncio.to_thread(_bytes_in, self._directory)
            if used > self._disk_bytes:
                limit = self._disk_bytes / 2**30
                self.kill(f"its datasets take {used} bytes of disk, more than the {limit:g} GiB of {DISK_LIMIT}")


def _bytes_in(directory: Path) -> int:
    """Return the disk space that the files in a directory take. Files that vanish meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
