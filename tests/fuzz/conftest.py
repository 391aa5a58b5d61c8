"""A mock server for all of it, and a look at it afterwards: still healthy, and no traceback in its log."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))
from running import Server


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("fuzzed")).start()
    yield server
    healthy, log = server.is_healthy(), server.log()
    server.close()
    assert healthy
    assert "Traceback" not in log, log[log.index("Traceback") - 200 :][:4000]
