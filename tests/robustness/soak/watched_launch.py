"""Run ``twinkle-server`` with days shortened to seconds, and write once a second what it holds in memory.

    watched_launch.py PROBE -- ARGUMENTS OF TWINKLE-SERVER

PROBE is the file with the latest counts, as JSON. They include what no route shows: slots on the device, versions in
the sampler, promised futures, caches. Limits come from the configuration; only constants that it cannot set are changed
here.
"""

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.servers.tuned_launch import end_with_parent
from tests.support.servers.tuning import tune
from twinkle.model.decoder.lora.stacks import SLOTS_PER_BLOCK
from twinkle.server.cli import command_line as cli
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.runtime import embedded
from twinkle.server.services.sampling import completions
from twinkle.server.state.store import Store

SEGMENT_BYTES = 64 * 1024  # no segment of 64 MiB would be full after twenty minutes, and none would be deleted
SECONDS = {"gap": 15.0, "snapshot": 1.0, "housekeeping": 1.0}
COMPLETIONS_SECONDS = 20.0  # instead of an hour


def counts(gateway: Gateway) -> dict[str, int]:
    """Count everything that should be zero, or as before, when the server is unused."""
    found = {"threads": len(os.listdir("/proc/self/task")), "python_blocks": sys.getallocatedblocks()}
    found["sampling_sessions_cached"] = len(gateway._samplers)
    found["sampling_clients"] = len(gateway._sampling_clients._covered) + len(gateway._sampling_clients._writing)
    found["heartbeats"] = len(gateway._heartbeats)
    processors = gateway.processors
    found["processor_sessions"] = 0 if processors is None else len(processors._sessions)
    found["processor_workers"] = 0 if processors is None else processors.status()["workers"]
    for entry in gateway.services.values():
        _add(found, _of_training(entry.training, entry.model.trainer))
        _add(found, _of_sampling(entry.sampling))
    return found


def _of_training(training: Any, trainer: Any) -> dict[str, int]:
    pool = trainer.pool
    return {
        "adapters": len(training.adapters),
        "trainer_adapters": len(trainer.adapter_ids()),
        "resident_adapters": len(pool.resident_ids()),
        "pool_versions": len(pool._versions),
        "slots": sum(_slots_in_use(stack) for stack in pool._stacks.values()),
        "training_promises": len(training._futures._promises),
        "tenants_unfetched": len(training._futures._unfetched_bytes),
        "scheduled_adapters": len(training._scheduler._adapters),
        "native_adapters": _native_adapters(training._kinds),
        "runner_tasks": len(training._runner._background._tasks),
        "snapshots_changed": len(training._runner._snapshots.noted()),
    }


def _native_adapters(kinds: Any) -> int:
    loaded = [kind._adapters for kind in kinds.by_payload.values() if kind._adapters is not None]
    return len(loaded[0]._library.optimizer_group) if loaded else 0


def _slots_in_use(stack: Any) -> int:
    return len(stack._blocks) * SLOTS_PER_BLOCK - len(stack._free)


def _of_sampling(sampling: Any) -> dict[str, int]:
    return {
        "versions": len(sampling._sampler.version_ids()),
        "version_pins": sum(sampling._versions._pins.values()),
        "sampling_promises": len(sampling._futures._promises),
        "tenants_unfetched": len(sampling._futures._unfetched_bytes),
        "sampling_jobs": len(sampling._jobs),
        "sampling_numbers": len(sampling._numbers),
        "completion_streams": len(sampling.completions._streams),
    }


def _add(found: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        found[name] = found.get(name, 0) + count


async def _watch(gateway: Gateway, probe: Path) -> None:
    while True:
        written = probe.with_suffix(".new")
        try:
            found = counts(gateway)
        # the counts read private attributes; if those have changed, log it instead of counting nothing
        except Exception:
            logging.getLogger(__name__).exception("the server cannot be counted")
            os._exit(1)
        written.write_text(json.dumps({"pid": os.getpid(), **found}))
        written.replace(probe)
        await asyncio.sleep(1.0)


def main(probe: Path, arguments: list[str]) -> None:
    end_with_parent()
    tune([f"{name}={seconds}" for name, seconds in SECONDS.items()])
    completions.Completions.__init__.__defaults__ = (COMPLETIONS_SECONDS,)  # type: ignore[misc]
    open_store, maintain = Store.open, embedded._maintain

    async def open_with_small_segments(*given: Any, **options: Any) -> Store:
        return await open_store(*given, **options, segment_bytes=SEGMENT_BYTES)

    async def maintain_and_watch(gateway: Gateway) -> None:
        watching = asyncio.create_task(_watch(gateway, probe))
        try:
            await maintain(gateway)
        finally:
            watching.cancel()

    Store.open = open_with_small_segments  # type: ignore[method-assign, assignment]
    embedded._maintain = maintain_and_watch
    cli.main(arguments)


if __name__ == "__main__":
    split = sys.argv.index("--")
    main(Path(sys.argv[1]), sys.argv[split + 1 :])
