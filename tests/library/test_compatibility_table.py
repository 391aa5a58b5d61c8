"""docs/compatibility.md has a row for every item of Tinker's checklist, and the tests that a row names exist."""

import re

import pytest

from tests.support.paths import ROOT

TESTS = ROOT / "tests"
PAGE = TESTS.parent / "docs" / "compatibility.md"
COUNTS = {"A": 6, "B": 4, "C": 7, "D": 3, "E": 12, "F": 3, "G": 8, "H": 10, "I": 4, "J": 3}
ITEMS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)] + ["K"]
_NAMED = re.compile(r"`(?P<file>[a-z_/]+/test_[a-z_0-9]+\.py)::(?P<test>test_[a-z_0-9]+)`")


def rows() -> dict[str, list[str]]:
    """Return the cells of each item's row."""
    _, _, section = PAGE.read_text().partition("\n## Tinker's checklist\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if re.match(r"\| [A-K]\d* \|", line)]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert len({row[0] for row in cells}) == len(cells), "an item has two rows"
    return {row[0].strip(): row[1:] for row in cells}


def test_every_item_has_a_row() -> None:
    assert list(rows()) == ITEMS
    for item, (what, level, here, _) in rows().items():
        assert what, item
        assert here, item
        assert level in ("must", "should", "rare"), item


@pytest.mark.parametrize("item", ITEMS)
def test_the_tests_of_an_item_exist(item: str) -> None:
    tests = rows()[item][-1]
    named = list(_NAMED.finditer(tests))
    assert named, "no test"
    assert _NAMED.sub("", tests).strip(" ,|") == "", "something else than tests"
    for one in named:
        source = (TESTS / one["file"]).read_text()
        assert re.search(rf"^( {{4}})?def {one['test']}\(", source, re.MULTILINE), one[0]
