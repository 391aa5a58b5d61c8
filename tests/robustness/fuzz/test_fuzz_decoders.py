"""Decoding any input ends with a result, or with an error that says whose mistake it was.

Every run tries the same few hundred bodies. ``make fuzz`` runs for minutes with a new seed, which it prints. FUZZ_SEED
repeats a run, and FUZZ_SECONDS is the time for each target.
"""

import faulthandler
import os
import random
import time
from pathlib import Path

import pytest

from tests.robustness.fuzz.targets import TARGETS

_HUNG_SECONDS = 60


def attempt(name: str, draw: random.Random) -> float:
    """Decode one changed body and return the time it took. A body that breaks the decoder is saved in build/fuzz."""
    target = TARGETS[name]
    body = draw.choice(target.seeds)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        try:
            body = target.change(draw, body, target.seeds)
        except ValueError:  # it is no longer JSON, which is a good test too
            break
    faulthandler.dump_traceback_later(_HUNG_SECONDS, exit=True)
    started = time.process_time()  # CPU time, because other processes use the machine
    try:
        target.run(body)
    except BaseException:
        found = Path("build/fuzz")
        found.mkdir(parents=True, exist_ok=True)
        (found / f"{name.replace(' ', '_')}.bin").write_bytes(body)
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    return time.process_time() - started


@pytest.mark.parametrize("name", TARGETS)
def test_good_requests_are_read(name: str) -> None:
    """The seeds must be valid: mutations of refused requests would find little."""
    for seed in TARGETS[name].seeds[:2]:
        TARGETS[name].read(seed)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's warnings about odd shapes
def test_a_few_hundred(name: str) -> None:
    draw = random.Random(f"{name} 1")
    for _ in range(200):
        attempt(name, draw)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_for_minutes(name: str) -> None:
    seed = int(os.environ.get("FUZZ_SEED") or time.time_ns())
    draw = random.Random(f"{name} {seed}")
    deadline = time.monotonic() + float(os.environ.get("FUZZ_SECONDS") or 30)
    slowest, count = 0.0, 0
    while time.monotonic() < deadline:
        try:
            slowest = max(slowest, attempt(name, draw))
        except BaseException:
            print(f"{name}: FUZZ_SEED={seed}, case {count}")
            raise
        count += 1
    print(f"\n{name}: {count} bodies, the slowest took {slowest * 1000:.0f} ms (FUZZ_SEED={seed})")
