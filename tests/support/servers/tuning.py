"""Constants of a server that tests change: they cannot wait six minutes for a gap to be given up."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from twinkle.model.types import TrainItem, TrainResult
from twinkle.server.backends.mock import MockSampler, MockTrainer
from twinkle.server.gateway import identity
from twinkle.server.runtime import assembly
from twinkle.server.scheduling.scheduler import Batch, Scheduler
from twinkle.server.services.training import snapshots
from twinkle.server.state.database import database
from twinkle.server.state.errors import StorageFullError
from twinkle.server.state.records import keys
from twinkle.server.state.records.ops import AcceptedOp, Ops
from twinkle.server.types import Op


def fill_disk_at(number: float) -> None:
    """There is no room for op ``number`` of any adapter the first time that it comes."""
    accept, refused = Ops.accept, set()

    async def accept_unless_full(self: Ops, op: Op, digest: bytes, now: float) -> AcceptedOp:
        if op.seq == number and op.adapter_id not in refused:
            refused.add(op.adapter_id)
            raise StorageFullError(28, "no room in the journal")
        return await accept(self, op, digest, now)

    Ops.accept = accept_unless_full


def _break_in_batch(number: float) -> None:
    """A bug in the trainer's loop, where nothing catches it."""
    next_batch, batches = Scheduler.next_batch, itertools.count(1)

    def broken(self: Scheduler) -> Batch | None:
        batch = next_batch(self)
        if batch is not None and next(batches) == number:
            raise ZeroDivisionError("a bug")
        return batch

    Scheduler.next_batch = broken  # type: ignore[method-assign]


def _give_up_gaps_after(seconds: float) -> None:
    build = Scheduler.__init__

    def init(self: Scheduler, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **{**options, "gap_timeout": seconds})

    Scheduler.__init__ = init  # type: ignore[method-assign]


def _die_of_token(token: float) -> None:
    """A pass with this token kills its process: what a request does that needs more memory than there is."""
    run = MockTrainer._pass

    def die_or_run(self: MockTrainer, item: TrainItem, train: bool) -> TrainResult:
        if any(token in datum.tokens for datum in item.data):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, item, train)

    MockTrainer._pass = die_or_run  # type: ignore[method-assign]


def _die_of_saving(_number: float) -> None:
    """Saving a checkpoint kills the process."""

    def die(self: MockTrainer, *_arguments: Any, **_options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    MockTrainer.prepare_save = die  # type: ignore[method-assign]


def _save_slowly(seconds: float) -> None:
    """Writing the files of a checkpoint takes so long; other ops run meanwhile."""
    prepare = MockTrainer.prepare_save

    def prepare_slowly(self: MockTrainer, *arguments: Any, **options: Any) -> Callable[[Path], None]:
        write = prepare(self, *arguments, **options)

        def wait_and_write(directory: Path) -> None:
            time.sleep(seconds)
            write(directory)

        return wait_and_write

    MockTrainer.prepare_save = prepare_slowly  # type: ignore[method-assign]


def _slow(method: str) -> Callable[[float], None]:
    """Return a setting that makes a method of all templates sleep first: large tokenizers and long texts take long."""

    def slow_by(seconds: float) -> None:
        from twinkle.template import Template  # a server without text does not load it

        quick = getattr(Template, method)

        def slow(self: Template, *arguments: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return quick(self, *arguments, **options)

        setattr(Template, method, slow)

    return slow_by


TUNING: dict[str, Callable[[float], None]] = {
    "pass": lambda seconds: MockTrainer.__init__.__kwdefaults__.update(pause=seconds),  # a batch of passes takes this
    "sample": lambda seconds: MockSampler.__init__.__kwdefaults__.update(pause=seconds),  # a turn of the sampler does
    "gap": _give_up_gaps_after,
    "snapshot": lambda seconds: setattr(snapshots, "_INTERVAL_SECONDS", seconds),
    "key_cache": lambda seconds: setattr(keys, "_CACHE_SECONDS", seconds),
    "otlp": lambda seconds: setattr(import_module("twinkle.server.telemetry.otlp"), "_TIMEOUT_SECONDS", seconds),
    "signed_url": lambda seconds: setattr(identity, "_VALID_SECONDS", seconds),
    "outage": lambda seconds: setattr(database, "_OUTAGE_SECONDS", seconds),
    "full_at": fill_disk_at,
    "bug": _break_in_batch,
    "poison": _die_of_token,
    "poison_save": _die_of_saving,
    "save": _save_slowly,
    "tokenizer": _slow("_load_tokenizer"),
    "encode": _slow("batch_encode"),
    "housekeeping": lambda seconds: setattr(assembly, "MAINTENANCE_SECONDS", seconds),
}


def tune(settings: Sequence[str]) -> None:
    """``name=seconds`` each."""
    for setting in settings:
        name, _, seconds = setting.partition("=")
        TUNING[name](float(seconds))
