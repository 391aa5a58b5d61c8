"""Every statement of the documents has a test, and every reason is on record."""

import re
from collections import Counter
from pathlib import Path

from tests.documented.documented_rows import ROWS
from tests.support.paths import ROOT

FOLDER = Path(__file__).parent
TITLE = "## Statements of the existing documents"


def rows_with_a_test() -> list[int]:
    files = "\n".join(file.read_text() for file in sorted(FOLDER.glob("test_*.py")))
    return [int(number) for number in re.findall(r"^def test_row_(\d\d)_", files, re.MULTILINE)]


def test_there_are_99_rows() -> None:
    assert [row.number for row in ROWS] == list(range(1, 100))
    assert len({row.statement for row in ROWS}) == len(ROWS)
    assert {row.document for row in ROWS} == set("ABCDE")


def test_every_row_has_one_test() -> None:
    counts = Counter(rows_with_a_test())
    assert counts == {row.number: 1 for row in ROWS}


def test_every_reason_is_in_the_documentation() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    section = page.partition(TITLE)[2].partition("\n## ")[0]
    listed = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    assert [(int(number), statement) for number, statement, _ in listed] == [
        (row.number, row.statement) for row in ROWS if row.outcome == "reason"
    ]
    assert all(reason.strip() for _, _, reason in listed)
