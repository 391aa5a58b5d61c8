"""The same client scripts with twinkle-kit's client, unmodified, in the place of ours (``make test-kit``)."""

from pathlib import Path

import pytest

from tests.dropin.support.client_checks import CHECKS, assert_done
from tests.dropin.support.client_runs import KIT_PYTHON, HubServer, Run, run_all
from tests.dropin.support.hub_folder import write_multimodal_hub

pytestmark = pytest.mark.kit


@pytest.fixture(scope="session")
def kit_runs(server: HubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    if not KIT_PYTHON.exists():
        pytest.skip("twinkle-kit is not installed; `make test-kit` does that")
    hub = tmp_path_factory.mktemp("kit-hub")
    write_multimodal_hub(hub, server.hub)
    return run_all(server, tmp_path_factory.mktemp("kit"), hub, KIT_PYTHON)


@pytest.mark.parametrize("name", CHECKS)
def test_kit_script(name: str, kit_runs: dict[str, Run], server: HubServer, model_folder: Path) -> None:
    assert_done(name, kit_runs[name], server, model_folder)
