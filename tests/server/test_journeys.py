"""The path of a request from its route handler to the trainer: short, and as described in docs/architecture.md.

The tests count all functions of our source that run meanwhile, in any thread of an otherwise idle server.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS, ROOT
from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import MODEL, Server, Tenant, datum
from tests.support.servers.traced_launch import TOKENS, TRAINER

REPOSITORY = ROOT
MAP = REPOSITORY / "docs" / "architecture.md"
ROWS = [{"input_ids": list(TOKENS), "labels": list(TOKENS)}]


@dataclass(frozen=True)
class Step:
    """A function that ran. ``handed``: one of its arguments was the request."""

    file: str
    function: str
    handed: bool


class TracedServer(Server):
    @property
    def trace(self) -> Path:
        return self.directory / "trace.json"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(PROGRAMS / "traced_launch.py"), str(self.trace), *arguments]

    def journey(self) -> list[Step]:
        """Return the steps of the last request in the order of first calls, without the trainer, where it ends."""
        return [step for each in json.loads(self.trace.read_text()) if (step := Step(*each)).file != TRAINER[0]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedServer]:
    server = TracedServer(tmp_path_factory.mktemp("traced"))
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def tinker(traced: TracedServer) -> list[Step]:
    tenant = Tenant(traced.url, "tml-journey")
    model = tenant.model()
    for seq_id in range(1, 4):  # the first request also imports modules and fills caches
        time.sleep(0.3)  # time for background work of the last request
        tenant.result(tenant.forward_backward(model, seq_id, [datum([*TOKENS, 37])]))
    return traced.journey()


@pytest.fixture(scope="module")
def native(traced: TracedServer) -> list[Step]:
    tenant = NativeTenant(traced.url, "journey", MODEL)
    tenant.add_adapter("a")
    for _ in range(3):
        time.sleep(0.3)
        tenant.verb("forward_backward", adapter_name="a", inputs=ROWS)
    return traced.journey()


def passed(journey: list[Step]) -> list[str]:
    """Return the files that the request passes: a function there gets it, in one of its forms, as an argument."""
    return list(dict.fromkeys(step.file for step in journey if step.handed))


def told(heading: str) -> list[tuple[str, str]]:
    """Return the steps of a journey in docs/architecture.md up to the trainer, as (file, function)."""
    text = MAP.read_text().split(f"## Journey of a {heading}")[1].split("```")[1].split(" Trainer.forward_backward")[0]
    steps = re.findall(r"^ *([\w/]+\.py):([\w.]+)", text, re.MULTILINE)
    return [
        (file.removeprefix("twinkle/") if file.startswith("twinkle/") else f"server/{file}", f) for file, f in steps
    ]


@pytest.mark.parametrize(
    ("protocol", "most_passed", "most_of_all"), [("tinker", 20, 50), ("native", 25, 67)], ids=["tinker", "native"]
)
def test_a_request_passes_few_files(
    protocol: str, most_passed: int, most_of_all: int, request: pytest.FixtureRequest
) -> None:
    """Counts the files that get the request.

    All files that ran, also for background work, have their own, generous limit.
    """
    journey: list[Step] = request.getfixturevalue(protocol)
    assert len(passed(journey)) <= most_passed, passed(journey)
    everywhere = sorted({step.file for step in journey})
    assert len(everywhere) <= most_of_all, everywhere


@pytest.mark.parametrize(("protocol", "heading"), [("tinker", "Tinker"), ("native", "native")])
def test_the_map_tells_the_journey_as_it_is(protocol: str, heading: str, request: pytest.FixtureRequest) -> None:
    journey: list[Step] = request.getfixturevalue(protocol)
    ran = [(step.file, step.function) for step in journey]
    steps = told(heading)
    missing = [step for step in steps if step not in ran]
    assert not missing, f"docs/architecture.md names what did not run: {missing}"
    assert [step for step in ran if step in steps] == steps, "the order of first calls is another"


def test_the_map_leaves_out_no_file_that_a_tinker_request_passes(tinker: list[Step]) -> None:
    text = MAP.read_text().split("## Journey of a Tinker")[1].split("## ")[0]
    missing = [file for file in passed(tinker) if file.removeprefix("server/") not in text]
    assert not missing
