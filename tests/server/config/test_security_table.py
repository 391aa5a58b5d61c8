"""SECURITY.md's table of what a tenant can consume, compared with the configuration's schema."""

import re

from tests.support.paths import ROOT
from twinkle.server.config.sections import LimitsConfig

_ROW = re.compile(r"^\| (?P<resource>[^|]+) \| (?P<default>[^|]+) \| `(?P<key>\w+)` \| (?P<effect>[^|]+) \|$", re.M)


def rows() -> dict[str, re.Match[str]]:
    """Return the rows that name a key of `limits`, by that key."""
    text = (ROOT / "SECURITY.md").read_text()
    found = {match["key"]: match for match in _ROW.finditer(text)}
    assert len(found) == len(list(_ROW.finditer(text))), "a key has two rows"
    return found


def shown(key: str, value: object) -> str:
    """Return a default that is not None, as the table writes it."""
    assert isinstance(value, int | float)
    if key.endswith("_gib"):
        return f"{value:g} GiB"
    if "bytes" in key:
        unit, size = next((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if value % s == 0)
        return f"{value // size} {unit}"
    if key.endswith("_seconds"):
        unit, size = next((u, s) for u, s in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)) if value % s == 0)
        return f"{value / size:g} {unit}"
    return f"{value:,}"


def test_every_limit_has_a_row_and_every_row_a_limit() -> None:
    assert rows().keys() == LimitsConfig.model_fields.keys()


def test_defaults_are_those_of_the_schema() -> None:
    defaults = {key: LimitsConfig.model_fields[key].default for key in rows()}
    for key, default in defaults.items():
        written = rows()[key]["default"]
        if default is None:  # no limit, or a share of the machine's memory
            assert re.fullmatch(r"none|a (fifth|quarter|twentieth) of .*", written), key
        else:
            assert written == shown(key, default)


def test_each_row_says_what_happens() -> None:
    for key, match in rows().items():
        assert match["effect"].strip(), key
