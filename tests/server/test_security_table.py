"""SECURITY.md's table of what a tenant can consume, compared with the configuration's schema."""

import re
from pathlib import Path

from twinkle.server.config.sections import LimitsConfig

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (?P<resource>[^|]+) \| (?P<default>[^|]+) \| `(?P<key>\w+)` \| (?P<effect>[^|]+) \|$", re.M)


def rows() -> dict[str, re.Match[str]]:
    """The rows of the table that name a key of `limits`, by that key."""
    text = (ROOT / "SECURITY.md").read_text()
    found = {match["key"]: match for match in _ROW.finditer(text)}
    assert len(found) == len(list(_ROW.finditer(text))), "a key has two rows"
    return found


def shown(key: str, value: object) -> str:
    """A default as the table writes it."""
    if value is None:
        return "none"
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
    wrong = {
        key: (match["default"], expected)
        for key, match in rows().items()
        if match["default"] != (expected := shown(key, LimitsConfig.model_fields[key].default))
    }
    assert wrong == {}


def test_each_row_says_what_happens() -> None:
    for key, match in rows().items():
        assert len(match["effect"]) > 10, key
