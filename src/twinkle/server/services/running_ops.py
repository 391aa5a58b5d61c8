"""A file that says which ops run right now, so that after a crash the next process knows which ops may have caused it.

There is one small file for each training service (on Ray: for each replica of a model). A batch appends one line
before it runs and one after it has ended, with a plain ``write``. No fsync is needed: the page cache survives the death
of the process, and the death of the whole machine says nothing about an op. A line usually costs some ten microseconds;
a row in the database would make every batch wait for a commit.

While large files are written to the same disk, a line can take a third of a second. So a separate thread writes the
lines, and the event loop goes on meanwhile. A batch waits for the line that it begins with (usually the compute thread
does, before it runs the batch), but not for the one at its end. If the process dies before that is written, because of
another op, the ops of the batch are suspects, too. They run alone next time, if they run again at all, and are cleared
by that.

    d REQUEST_ID COUNT    at the start of the file: the process died COUNT times while this op ran
    + NUMBER REQUEST_ID…  a batch begins
    - NUMBER              the batch has ended, whether its ops succeeded or not
    ~ NUMBER              the batch was only decoded or loaded from disk, which has ended: its ops are still to run
    s                     the process was asked to stop: its death from now on is not blamed on an op

An op that was running, decoded or loaded when the process died is a suspect: next time it runs alone. If the process
dies again during it, only that op has two deaths; it is poison and is not run a third time. Samples are not in the
journal and are never run again, so they are not recorded here.
"""

import asyncio
import logging
import os
from asyncio import wrap_future
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path

logger = logging.getLogger(__name__)

MOST_DEATHS = 2  # after this many deaths of the process an op is not run again
_COMPACT_BYTES = 65_536  # above this size the file is rewritten when nothing runs and there are no suspects …
_MOST_BYTES = 2**20  # … and above this size in any case


class RunningOps:
    """The ops of one training service that run now, and the suspects: ops during which an earlier process died, each
    with the number of deaths.

    Belongs to one event loop. After the constructor only the writing thread uses the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the file of the last process, and count its death, if it died. Blocks briefly, for file I/O."""
        self._path = path
        self._fd: int | None = None
        self._size = 0
        self._numbers = count(1)
        self._batches: dict[int, Sequence[str]] = {}
        self._turn = asyncio.Lock()
        self._stopping = False
        self._closed = False
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._deaths = _read(path)
        for request_id, deaths in self._deaths.items():
            logger.warning("the server died %d time(s) while it ran request %s", deaths, request_id)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="running-ops")
        self._replace(self._whole())

    def keep_only(self, request_ids: Iterable[str]) -> None:
        """Forget the deaths during all ops except ``request_ids``: the other ops will not run again."""
        self._deaths = {each: self._deaths[each] for each in request_ids if each in self._deaths}

    def deaths(self, request_id: str) -> int:
        """Return how often the process died while this op ran."""
        return self._deaths.get(request_id, 0)

    @property
    def has_suspects(self) -> bool:
        """Return whether there are ops during which an earlier process died and which have not ended since."""
        return bool(self._deaths)

    def forgive(self, request_id: str) -> None:
        """Forget that earlier processes died during this op, because it ended without running."""
        self._deaths.pop(request_id, None)

    def apart(self, request_ids: Sequence[str]) -> Iterator[slice]:
        """Divide a batch into parts, in order, so that each op during which an earlier process died is alone in its
        part.
        """
        first = 0
        for index, request_id in enumerate(request_ids):
            if request_id in self._deaths:
                if first < index:
                    yield slice(first, index)
                yield slice(index, index + 1)
                first = index + 1
        if first < len(request_ids):
            yield slice(first, len(request_ids))

    @asynccontextmanager
    async def noted(
        self, request_ids: Sequence[str], *, decoding: bool = False, waits: bool = True
    ) -> AsyncIterator[Future[None]]:
        """Record on disk that these ops run, for the duration of the ``async with`` block.

        The block gets the future of its line in the file. Without ``waits`` the line may not be written yet, and the
        ops must not run before it is.

        An op is a suspect if an earlier process died while the op ran. While there are suspects, only one block runs
        at a time, so that the next death names its op. ``decoding``: the ops are only prepared to run; those that are
        suspects remain so after the block.
        """
        async with self._turn if self._deaths else nullcontext():
            number = next(self._numbers)
            self._batches[number] = request_ids
            line = self._append(f"+ {number} {' '.join(request_ids)}\n")
            ran = False
            try:
                if waits:
                    await wrap_future(line)
                ran = not decoding
                yield line
            finally:
                ended = self._end(number, ran)
            if decoding:  # the ops are still to run, so they should not be suspects for what happens now
                await wrap_future(ended)

    def _end(self, number: int, ran: bool) -> Future[None]:
        request_ids = self._batches.pop(number)
        ended = self._append(f"{'-' if ran else '~'} {number}\n")
        if ran:
            for request_id in request_ids:
                self._deaths.pop(request_id, None)
        cheap = not self._batches and not self._deaths
        if self._size > (_COMPACT_BYTES if cheap else _MOST_BYTES):
            data = self._whole()
            self._size = len(data)
            ended = self._submit(self._replace, data)
        return ended

    async def stopping(self) -> None:
        """Note that the process was asked to stop, so that its death from now on is not blamed on an op."""
        self._stopping = True
        await wrap_future(self._append("s\n"))

    async def close(self) -> None:
        """Record that no op runs any more, and close the file. Nothing is written after that."""
        self._batches.clear()
        self._submit(self._replace, self._whole())
        closed = self._submit(self._close_file)
        self._closed = True
        await wrap_future(closed)
        self._writer.shutdown()

    def _append(self, line: str) -> Future[None]:
        data = line.encode()
        self._size += len(data)
        return self._submit(self._write, data)

    def _submit(self, work: Callable[..., None], *args: object) -> Future[None]:
        if not self._closed:
            return self._writer.submit(work, *args)
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing

    def _whole(self) -> bytes:
        """Return the content of a file with only the lines that still matter."""
        lines = [f"d {request_id} {deaths}\n" for request_id, deaths in self._deaths.items()]
        lines += [f"+ {number} {' '.join(ids)}\n" for number, ids in self._batches.items()]
        lines += ["s\n"] if self._stopping and self._batches else []
        return "".join(lines).encode()

    # --- in the writing thread ----------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, data)
        except OSError as error:  # such as a full disk: better to run the op without a record than not at all
            logger.error("%s: cannot record which ops run: %s", self._path, error)

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _replace(self, data: bytes) -> None:
        """Replace the file, atomically, by one with this content."""
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, data)
                os.replace(new, self._path)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            logger.error("%s cannot be written: %s", self._path, error)
            return
        self._close_file()
        self._fd = fd


def _read(path: Path) -> dict[str, int]:
    """Return how often processes died during each op that has not ended since. Incomplete lines are ignored.

    The death of the last process counts unless it had been asked to stop.
    """
    deaths: dict[str, int] = {}
    batches: dict[str, list[str]] = {}
    stopping = False
    text = ""
    with suppress(FileNotFoundError):
        text = path.read_text(errors="replace")
    for line in text.splitlines(keepends=True):
        words = line.split()
        if not line.endswith("\n") or not words:
            continue
        if words[0] == "d" and len(words) == 3 and words[2].isdigit():
            deaths[words[1]] = int(words[2])
        elif words[0] == "+" and len(words) > 2:
            batches[words[1]] = words[2:]
        elif words[0] in "-~" and len(words) == 2:
            for request_id in batches.pop(words[1], ()):
                if words[0] == "-":
                    deaths.pop(request_id, None)
        elif words[0] == "s":
            stopping = True
    for request_ids in () if stopping else batches.values():
        for request_id in request_ids:
            deaths[request_id] = deaths.get(request_id, 0) + 1
    return deaths
