"""Fixtures for tests of the real SDK against a real server with a tiny model.

A test fails if the SDK logs a warning. Where a warning is expected, mark the test with ``@pytest.mark.complaint("part
of the warning")``.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import torch

from tests.support.models.sdk_images import SEES
from tests.support.servers.serving import MODEL, SdkServer
from twinkle.model import Trainer

os.environ["NO_PROXY"] = "127.0.0.1,localhost"
os.environ["TINKER_TELEMETRY"] = "1"


class _Complaints(logging.Handler):
    """Collects the SDK's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.name}: {record.getMessage()}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    """The server that all tests share. A test that must disturb a server starts its own SdkServer."""
    running = SdkServer(tmp_path_factory.mktemp("server")).start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def seeing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    """A server whose model sees, for the tests of images."""
    running = SdkServer(tmp_path_factory.mktemp("seeing"), model=SEES).start()
    yield running
    assert running.stop() == 0


@pytest.fixture(autouse=True)
def no_complaints(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test if the SDK logged a warning that its ``complaint`` marker does not name."""
    complaints = _Complaints()
    logging.getLogger("tinker").addHandler(complaints)
    try:
        yield
    finally:
        logging.getLogger("tinker").removeHandler(complaints)
    expected = request.node.get_closest_marker("complaint")
    allowed = () if expected is None else expected.args
    assert [line for line in complaints.seen if not any(text in line for text in allowed)] == []


@pytest.fixture
def service(server: SdkServer, request: pytest.FixtureRequest) -> tinker.ServiceClient:
    """The SDK's client of a tenant that no other test uses."""
    return server.service(request.node.name)


@pytest.fixture(scope="session")
def trainer() -> Trainer:
    """The same model in this process, on as many threads as the server uses: a result's bits depend on that."""
    torch.set_num_threads(1)
    return Trainer.from_pretrained(MODEL, device="cpu", dtype="fp32")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A temporary directory."""
    return tmp_path
