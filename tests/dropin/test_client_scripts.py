"""The client scripts that need no images run unchanged on our packages, and their numbers are the plain ones."""

from pathlib import Path

import pytest

from tests.dropin.support.client_checks import CHECKS, assert_done
from tests.dropin.support.client_runs import HubServer, Run


@pytest.mark.parametrize("name", CHECKS)
def test_client_script(name: str, runs: dict[str, Run], server: HubServer, model_folder: Path) -> None:
    assert_done(name, runs[name], server, model_folder)
