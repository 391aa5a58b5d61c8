"""The table of docs/models.md: each cell that says yes links to a test that exists and knows the family."""

import re
from pathlib import Path

import pytest

from tests.model.decoder.test_architectures import UNPINNED
from tests.model.experts.test_other_families import OTHERS
from tests.support.models.seeing_models import SEEING, SEEING_WITH_EXPERTS
from tests.support.models.tiny_models import EXPERT_FAMILIES, FAMILIES
from tests.support.paths import ROOT
from twinkle.model.decoder.architecture import TESTED_FAMILIES

PAGE = ROOT / "docs" / "models.md"
TEXT = PAGE.read_text()
COLUMNS = ["family", "trains", "samples, torch", "samples, vLLM", "Megatron", "exports", "packed", "images"]
# [name]: ../tests/path.py "test_name", at the end of the page
LINKS = {name: (path, test) for name, path, test in re.findall(r'^\[(.+?)\]: (\S+) "(\w+)"$', TEXT, re.MULTILINE)}
_LISTS = {
    "FAMILIES": FAMILIES,
    "EXPERT_FAMILIES": EXPERT_FAMILIES,
    "SEEING": SEEING,
    "SEEING_WITH_EXPERTS": SEEING_WITH_EXPERTS,
}


def _rows() -> dict[str, list[str]]:
    """Return the cells of each row by the name that the family has in the tests."""
    rows = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == len(COLUMNS) and (found := re.search(r"`(\w+)`", cells[0])):
            rows[found[1]] = cells[1:]
    return rows


ROWS = _rows()
PROVEN = [
    (family, column, name)
    for family, cells in ROWS.items()
    for column, cell in zip(COLUMNS[1:], cells, strict=True)
    for name in re.findall(r"\[[^]]+\]\[(.+?)\]", cell)
]


def test_the_table_has_these_columns() -> None:
    assert f"| {' | '.join(COLUMNS)} |" in TEXT


def test_every_family_of_the_tests_has_a_row() -> None:
    tested = {name.partition("-")[0] for name in (*FAMILIES, *EXPERT_FAMILIES)} | {*SEEING, *SEEING_WITH_EXPERTS}
    assert ROWS.keys() == tested
    assert {family.removesuffix("_text") for family in TESTED_FAMILIES} <= ROWS.keys()


def test_every_cell_says_what_it_means() -> None:
    allowed = r"no|refused|not tested|text only|padded|(?:\[[^]]+\]\[[^]]+\](?:, )?)+"
    odd = [(family, cell) for family, cells in ROWS.items() for cell in cells if not re.fullmatch(allowed, cell)]
    assert not odd


@pytest.mark.parametrize(("family", "column", "name"), PROVEN)
def test_a_test_proves_the_cell(family: str, column: str, name: str) -> None:
    path, test = LINKS[name]
    file = (PAGE.parent / path).resolve()
    text = file.read_text()
    assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{path} has no {test}"
    named = re.sub(r"[-.]", "_", text + "".join(each.read_text() for each in _programs_beside(file)))
    listed = {key for name, families in _LISTS.items() if re.search(rf"\b{name}\b", text) for key in families}
    assert family in listed or re.search(rf"(?<![a-z0-9]){family}(?![a-z0-9])", named.replace("_tiny", "")), (
        f"{path} does not know {family}"
    )


def _programs_beside(file: Path) -> list[Path]:
    """Return the programs and models that tests in several processes import."""
    return [path for path in file.parent.glob("*.py") if path.name.endswith(("_programs.py", "_model.py"))]


def test_no_link_is_left_over() -> None:
    assert LINKS.keys() == {name for _, _, name in PROVEN}


def test_families_that_are_compared_at_the_start_are_listed() -> None:
    listed = TEXT.partition("## Other families")[2]
    missing = [family for family in (*UNPINNED, *OTHERS) if f"`{family}`" not in listed]
    assert not missing
