"""Processes that train together: each runs the functions that it receives and sends back their results."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_TIMEOUT = 240  # seconds; longer than any program here takes on a busy machine
_PROGRAMS = tuple(f"tests.model.parallel.{name}_programs" for name in ("lora", "full", "all_parameters", "sequence"))


class ProcessPool:
    """``size`` processes connected by gloo, which run many programs.

    A failing program ends them; the next run starts new ones. ``programs``: the modules that all of them import. Python
    has one server that forks the processes, so the modules of the first pool that starts are imported once for all.
    """

    def __init__(self, size: int, programs: Sequence[str] = _PROGRAMS) -> None:
        self.size = size
        self._programs = list(programs)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._mesh: object = None

    def on(self, mesh: object) -> "ProcessPool":
        """Return this pool, with new processes unless the last programs ran on the same mesh.

        A process that leaves a mesh keeps the threads of its groups, thousands after a few meshes.
        """
        if mesh != self._mesh:
            self.close()
        self._mesh = mesh
        return self

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``program(*args)`` on each rank and return the results by rank."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((program, args))
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(_TIMEOUT):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer: {program.__name__}{args}")
            answers.append(connection.recv())
        failed = [text for text, _ in answers if text is not None]
        if failed:
            self.close()
            raise RuntimeError("\n".join(failed))
        return [result for _, result in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._connections, self._processes = [], []

    def _start(self) -> None:
        import torch

        # With a fork server imports happen only once, but a process that was forked after them cannot use CUDA.
        context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        context.set_forkserver_preload(self._programs)
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, str(meeting)), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)


def _serve(connection: Connection, rank: int, size: int, meeting: str) -> None:
    import torch
    import torch.distributed

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    while True:
        try:
            program, args = connection.recv()
        except EOFError:  # the tests have ended
            return
        try:
            answer = None, program(*args)
        except Exception:  # noqa: BLE001 (it is told to the tests)
            answer = f"rank {rank}: {traceback.format_exc()}", None
        connection.send(answer)
