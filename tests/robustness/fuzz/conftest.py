"""A mock server for all of it, and a look at it afterwards: still healthy, and no traceback in its log."""

from collections.abc import Iterator

import pytest

from tests.support.servers.running import Server


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("fuzzed")).start()
    yield server
    healthy, log = server.is_healthy(), server.log()
    server.close()
    assert healthy
    assert "Traceback" not in log, log[log.index("Traceback") - 200 :][:4000]
