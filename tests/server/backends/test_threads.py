"""Methods that belong to one thread declare it, and tests fail if another thread calls them."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.servers.running import CHECKS

SCRIPT = """
import asyncio
from twinkle.server.backends.compute_thread import Compute, compute_thread, event_loop

@compute_thread
def computes() -> str:
    return "computed"

@event_loop
def changes() -> str:
    return "changed"

async def main() -> None:
    compute = Compute()
    print(await compute.run(computes), changes())
    for wrong in (lambda: asyncio.sleep(0, computes()), lambda: compute.run(changes)):
        try:
            await wrong()
        except AssertionError as error:
            print(error)
    compute.close()

asyncio.run(main())
print(computes(), changes())
"""


@pytest.mark.parametrize("checked", [True, False])
def test_a_call_from_another_thread_is_found(checked: bool) -> None:
    source = str(ROOT / "src")
    variables = {name: value for name, value in os.environ.items() if name not in CHECKS}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**variables, "PYTHONPATH": source, **(CHECKS if checked else {})},
        capture_output=True,
        text=True,
        check=True,
    )
    found = ["computes belongs to the compute thread", "changes belongs to the event loop"] if checked else []
    assert done.stdout.splitlines() == ["computed changed", *found, "computed changed"]
