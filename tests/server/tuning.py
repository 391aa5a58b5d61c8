"""Constants of a server that tests change: they cannot wait six minutes for a gap to be given up."""

from collections.abc import Callable, Sequence
from importlib import import_module

from twinkle.server import embedded, signed_urls, snapshots
from twinkle.server.mock import MockSampler, MockTrainer
from twinkle.server.scheduler import Scheduler
from twinkle.server.state import StorageFullError, database, keys
from twinkle.server.state.ops import Accepted, Ops
from twinkle.server.types import Op


def fill_disk_at(number: float) -> None:
    """There is no room for op ``number`` of any adapter the first time that it comes."""
    accept, refused = Ops.accept, set()

    async def accept_unless_full(self: Ops, op: Op, digest: bytes, now: float) -> Accepted:
        if op.seq == number and op.adapter_id not in refused:
            refused.add(op.adapter_id)
            raise StorageFullError(28, "no room in the journal")
        return await accept(self, op, digest, now)

    Ops.accept = accept_unless_full


TUNING: dict[str, Callable[[float], None]] = {
    "pass": lambda seconds: MockTrainer.__init__.__kwdefaults__.update(pause=seconds),  # a batch of passes takes this
    "sample": lambda seconds: MockSampler.__init__.__kwdefaults__.update(pause=seconds),  # a turn of the sampler does
    "gap": lambda seconds: Scheduler.__init__.__kwdefaults__.update(gap_timeout=seconds),
    "snapshot": lambda seconds: setattr(snapshots, "_INTERVAL_SECONDS", seconds),
    "key_cache": lambda seconds: setattr(keys, "_CACHE_SECONDS", seconds),
    "otlp": lambda seconds: setattr(import_module("twinkle.server.telemetry.otlp"), "_TIMEOUT_SECONDS", seconds),
    "signed_url": lambda seconds: setattr(signed_urls, "_VALID_SECONDS", seconds),
    "outage": lambda seconds: setattr(database, "_OUTAGE_SECONDS", seconds),
    "full_at": fill_disk_at,
    "housekeeping": lambda seconds: setattr(embedded, "_HOUSEKEEPING_SECONDS", seconds),
}


def tune(settings: Sequence[str]) -> None:
    """``name=seconds`` each."""
    for setting in settings:
        name, _, seconds = setting.partition("=")
        TUNING[name](float(seconds))
