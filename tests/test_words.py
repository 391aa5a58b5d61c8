"""Names and docstrings must be understandable at first reading. docs/glossary.md defines the words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT, SOURCE

RIDDLES = {"of", "say", "keep", "told"}  # method names that mean nothing without their class
BEGINNINGS = ("Of ", "As above", "Likewise")
FILES = sorted(path for path in SOURCE.rglob("*.py") if not path.name.endswith("_pb2.py"))
GLOSSARY = ROOT / "docs" / "glossary.md"


def named(path: Path) -> Iterator[ast.AST]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def replaced() -> list[str]:
    """Return the old names in the glossary's last table."""
    _, _, section = GLOSSARY.read_text().partition("\n## Names that are gone\n")
    return [
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_methods_and_docstrings_are_plain(path: Path) -> None:
    for node in named(path):
        name = getattr(node, "name", path.stem)
        assert name not in RIDDLES, f"{path}: {name}"
        text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
        assert not text.startswith(BEGINNINGS), f"{path}: {name}: {text.splitlines()[0]}"


def test_names_that_the_glossary_replaced_are_gone() -> None:
    old = replaced()
    assert old, "the glossary has no table of names that are gone"
    pattern = re.compile(rf"\b({'|'.join(old)})\b")
    found = [
        f"{path.relative_to(SOURCE)}: {match[0]}" for path in FILES for match in pattern.finditer(path.read_text())
    ]
    assert not found, found
