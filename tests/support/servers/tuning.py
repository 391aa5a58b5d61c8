"""Settings that change the timings or the behaviour of a server under test.

Tests cannot wait, for example, six minutes until a gap in the sequence numbers times out. Settings in ``TIMINGS`` are
arguments of the server; those in ``FAULTS`` replace methods in its process. Tests pass settings as keyword arguments
of ``own_server`` or ``Server``, or as arguments of tuned_launch.py.
"""

import importlib.util
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from twinkle.model.types import TrainItem, TrainResult
from twinkle.server.backends.mock import MockTrainer
from twinkle.server.config.timings import Timings
from twinkle.server.http import streams
from twinkle.server.scheduling.scheduler import Batch, Scheduler
from twinkle.server.state.errors import StorageFullError
from twinkle.server.state.records.ops import AcceptedOp, Ops
from twinkle.server.types import Op
from twinkle.utils import progress


def fill_disk_at(number: float) -> None:
    """Report a full disk for op ``number`` of each adapter, the first time that this op arrives."""
    accept, refused = Ops.accept, set()

    async def accept_unless_full(self: Ops, op: Op, digest: bytes, now: float) -> AcceptedOp:
        if op.seq == number and op.adapter_id not in refused:
            refused.add(op.adapter_id)
            raise StorageFullError(28, "no room in the journal")
        return await accept(self, op, digest, now)

    Ops.accept = accept_unless_full


def _break_in_batch(number: float) -> None:
    """Raise an exception in the service loop of the trainer at this batch, at a place where nothing catches it."""
    next_batch, batches = Scheduler.next_batch, itertools.count(1)

    def broken(self: Scheduler, *, hold_passes: bool = False) -> Batch | None:
        batch = next_batch(self, hold_passes=hold_passes)
        if batch is not None and next(batches) == number:
            raise ZeroDivisionError("a bug")
        return batch

    Scheduler.next_batch = broken  # type: ignore[method-assign]


def _give_up_gaps_after(seconds: float) -> None:
    """Set the time after which the scheduler stops waiting for a missing sequence number."""
    build = Scheduler.__init__

    def init(self: Scheduler, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **{**options, "gap_timeout": seconds})

    Scheduler.__init__ = init  # type: ignore[method-assign]


def _die_of_token(token: float) -> None:
    """Kill the process at a pass with this token, as the kernel would if a request needed too much memory."""
    run = MockTrainer._pass

    def die_or_run(self: MockTrainer, item: TrainItem, train: bool) -> TrainResult:
        if any(token in datum.tokens for datum in item.data):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, item, train)

    MockTrainer._pass = die_or_run  # type: ignore[method-assign]


def _when_imported(module: str, change: Callable[[Any], None]) -> None:
    """Change a module as soon as this process has imported it.

    Importing it now would slow down the start of all processes of Ray, and would import Ray into the launcher before
    that has set its variables.
    """

    class Finder(MetaPathFinder):
        """Finds the module as Python does, and changes it after its code has run."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name != module:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            assert spec is not None
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_change(made: ModuleType) -> None:
                execute(made)
                change(made)

            loader.exec_module = execute_and_change
            return spec

    sys.meta_path.insert(0, Finder())


_RANK = "twinkle.server.runtime.ray.actors.trainer_rank"


def _rank_dies_of_token(token: float) -> None:
    """Kill a rank of a trainer's group at a pass with this token."""

    def change(module: Any) -> None:
        run = module.TrainerRank.passes

        def die_or_run(self: Any, method: str, items: Sequence[TrainItem], **options: Any) -> Any:
            if any(token in datum.tokens for item in items for datum in item.data):
                os.kill(os.getpid(), signal.SIGKILL)
            return run(self, method, items, **options)

        module.TrainerRank.passes = die_or_run

    _when_imported(_RANK, change)


def _rank_differs_after(number: float) -> None:
    """Let a rank of a trainer's group answer once with another fingerprint, after it got the signal ``number``."""
    asked = list[bool]()

    def change(module: Any) -> None:
        honest = module.fingerprint

        def fingerprint(result: object) -> Any:
            mine = honest(result)
            if asked:
                asked.clear()
                return replace(mine, digest="another one")
            return mine

        module.fingerprint = fingerprint

    _when_imported(_RANK, change)
    signal.signal(int(number), lambda *_: asked.append(True))


def _rank_loads_slowly(seconds: float) -> None:
    """Let the ranks of a trainer's group get further for so many seconds before they load. SIGUSR2 lets a rank hang."""

    def change(module: Any) -> None:
        load = module.load_trainer

        def load_slowly(*arguments: Any, **options: Any) -> Any:
            with progress.Progress("loading slowly") as now:
                for _ in now.count(range(int(seconds)), "seconds", int(seconds)):
                    time.sleep(1.0)
            return load(*arguments, **options)

        module.load_trainer = load_slowly

    _when_imported(_RANK, change)
    signal.signal(signal.SIGUSR2, lambda *_: time.sleep(86_400.0))


def _die_of_saving(_number: float) -> None:
    """Kill the process when it saves a checkpoint."""

    def die(self: MockTrainer, *_arguments: Any, **_options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    MockTrainer.prepare_save = die  # type: ignore[method-assign]


def _fail_saving(_number: float) -> None:
    """Report a full disk whenever checkpoint files are written."""

    def fail(self: MockTrainer, *_arguments: Any, **_options: Any) -> Any:
        raise StorageFullError(28, "no room for files")

    MockTrainer.prepare_save = fail  # type: ignore[method-assign]


def _save_slowly(seconds: float) -> None:
    """Delay the writing of checkpoint files by this many seconds. Other ops run meanwhile."""
    prepare = MockTrainer.prepare_save

    def prepare_slowly(self: MockTrainer, *arguments: Any, **options: Any) -> Callable[[Path], None]:
        write = prepare(self, *arguments, **options)

        def wait_and_write(directory: Path) -> None:
            time.sleep(seconds)
            write(directory)

        return wait_and_write

    MockTrainer.prepare_save = prepare_slowly  # type: ignore[method-assign]


def _report_after(seconds: float) -> None:
    """Report on long work after this many seconds."""
    progress.FIRST_SECONDS = seconds


def _slow(method: str) -> Callable[[float], None]:
    """Return a setting that delays a method of all templates, as large tokenizers and long texts do."""

    def slow_by(seconds: float) -> None:
        from twinkle.template import Template  # a server that handles no text does not import it

        quick = getattr(Template, method)

        def slow(self: Template, *arguments: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return quick(self, *arguments, **options)

        setattr(Template, method, slow)

    return slow_by


def _comment_after(seconds: float) -> None:
    """Begin streams of server-sent events with a comment after this time, and repeat it."""
    streams._QUIET_SECONDS = seconds


# Settings that are arguments of the server, with the names of these arguments.
TIMINGS = {
    "pass": "mock_pass",
    "sample": "mock_step",
    "snapshot": "snapshot",
    "key_cache": "key_cache",
    "otlp": "export",
    "signed_url": "signed_url",
    "outage": "outage",
    "housekeeping": "maintenance",
}
# Settings that replace methods: faults, and work that takes longer than it should.
FAULTS: dict[str, Callable[[float], None]] = {
    "gap": _give_up_gaps_after,
    "quiet": _comment_after,
    "full_at": fill_disk_at,
    "bug": _break_in_batch,
    "poison": _die_of_token,
    "poison_save": _die_of_saving,
    "rank_poison": _rank_dies_of_token,
    "rank_differs": _rank_differs_after,
    "rank_loads": _rank_loads_slowly,
    "save": _save_slowly,
    "full_save": _fail_saving,
    "progress": _report_after,
    "tokenizer": _slow("_load_tokenizer"),
    "encode": _slow("batch_encode"),
}


def tune(settings: Sequence[str]) -> Timings:
    """Put the faults among the settings into this process, and return the timings among them.

    Each setting is given as ``name=number``. The number is mostly a time in seconds.
    """
    timings = {}
    for setting in settings:
        name, _, number = setting.partition("=")
        if name in TIMINGS:
            timings[TIMINGS[name]] = float(number)
        else:
            FAULTS[name](float(number))
    return Timings(**timings)
