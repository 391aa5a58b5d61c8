"""The table in README.md names every script of the existing Twinkle, and each that is said to run has a test."""

import re

from tests.dropin.support.client_checks import CHECKS
from tests.dropin.support.existing_scripts import (
    CLIENT,
    EXPERT_ADAPTERS,
    EXPERTS,
    IMAGES,
    LOCAL,
    TARGET_PARAMETERS,
    Existing,
)
from tests.dropin.support.local_runs import ARGUMENTS, MEGATRON_ARGUMENTS
from tests.dropin.support.megatron_checks import MEGATRON_CHECKS
from tests.dropin.support.ray_checks import CHECKS as RAY_CHECKS
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "dropin"


def _row(script: Existing) -> tuple[str, str]:
    return script.path, f"`{script.ours}`" if script.ours else f"waits for {script.waits_for}"


def test_every_existing_script_is_listed() -> None:
    assert (len(LOCAL), len(CLIENT)) == (20, 15)
    assert len({script.path for script in LOCAL}) == 20
    assert len({script.path for script in CLIENT}) == 15
    for script in (*LOCAL, *CLIENT):
        assert (script.ours is None) != (script.waits_for is None), script.path
        assert script.waits_for in (None, EXPERT_ADAPTERS, EXPERTS, IMAGES, TARGET_PARAMETERS)


def test_the_page_has_the_same_table() -> None:
    page = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| `((?:transformers|megatron|rl|twinkle|tinker)/\S+)` \| (.+?) \|$", page, re.MULTILINE)
    assert rows == [_row(script) for script in (*LOCAL, *CLIENT)]


def test_every_script_that_runs_has_a_test() -> None:
    clients = {script.ours for script in CLIENT if script.ours}
    assert clients == {f"client/{name}.py" for name in CHECKS}
    assert len(clients) == 13
    assert {script.ours for script in LOCAL if script.ours} == {
        f"local/{name}.py" for name in {*ARGUMENTS, *MEGATRON_ARGUMENTS, *RAY_CHECKS, *MEGATRON_CHECKS}
    }
    files = {
        file.relative_to(FOLDER).as_posix() for part in ("client", "local") for file in FOLDER.glob(f"{part}/**/*.py")
    }
    assert files == {script.ours for script in (*LOCAL, *CLIENT) if script.ours}
