"""Servers with a memory limit, for tests that attack them. A test fails if its server exceeded the limit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.attack.confined import LIMIT, ConfinedServer


@pytest.fixture
def confined_server(tmp_path: Path) -> Iterator[Callable[..., ConfinedServer]]:
    """``confined_server(config, limit=3 * GIB, **tuning)`` starts a server under a memory limit; see confined.py.

    Otherwise it is like ``own_server`` in tests/server/conftest.py.
    """
    servers: list[ConfinedServer] = []

    def make(config: dict[str, Any] | None = None, limit: int = LIMIT, **tuning: float) -> ConfinedServer:
        directory = tmp_path / f"server{len(servers)}"
        directory.mkdir()
        servers.append(ConfinedServer(directory, config, **tuning).confine(limit))
        servers[-1].start()
        return servers[-1]

    yield make
    kills = [server.confinement.kills() for server in servers]
    for server in servers:
        server.close()
    assert not any(kills), "a server was killed for memory, or used more than its limit"
