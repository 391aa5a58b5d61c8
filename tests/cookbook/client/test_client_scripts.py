"""Rules that hold for all scripts of cookbook/client."""

from tests.cookbook.client.client_cookbook import CLIENT

LINES = 150  # short enough to read in one go


def test_scripts_are_short() -> None:
    lengths = {script: len(script.read_text().splitlines()) for script in CLIENT.rglob("*.py")}
    assert len(lengths) > 10
    too_long = {script.name for script, length in lengths.items() if length > LINES}
    # a demonstration that starts its own server, and scripts that test what they learn on pictures they have not seen
    assert too_long == {"demo.py", "multi_modal.py"}
