"""Fixtures that run the client scripts once, all against one server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

for checks in ("client_checks", "megatron_checks", "plain_models", "ray_checks", "rollout_checks"):
    pytest.register_assert_rewrite(f"tests.dropin.support.{checks}")

from tests.dropin.support.client_runs import HubServer, Run, run_all  # noqa: E402
from tests.dropin.support.hub_folder import write_hub  # noqa: E402


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in the stand-in for a hub."""
    return write_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    running = HubServer(tmp_path_factory.mktemp("server"), model_folder)
    running.start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def runs(server: HubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """What each client script did with our client."""
    return run_all(server, tmp_path_factory.mktemp("runs"), server.hub)
