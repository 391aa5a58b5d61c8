"""A mock server to fuzz. After the tests it must be healthy and have no traceback in its log."""

from collections.abc import Iterator

import pytest

from tests.support.servers.running import Server


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The mock server that all tests of a module attack."""
    server = Server(tmp_path_factory.mktemp("fuzzed")).start()
    yield server
    healthy, log = server.is_healthy(), server.log()
    server.close()
    assert healthy
    assert "Traceback" not in log, log[log.index("Traceback") - 200 :][:4000]
