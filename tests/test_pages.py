"""The pages for contributors name files, tests and methods that exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT, SOURCE

PAGES = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
SERVER = SOURCE / "twinkle" / "server"
# Where a path on a page may begin.
ROOTS = (ROOT, SOURCE, SERVER, SOURCE / "twinkle", SOURCE / "twinkle" / "model", SOURCE / "twinkle" / "sampler")


def quoted(page: Path, pattern: str) -> set[str]:
    """Return the names between backticks that match the pattern."""
    return set(re.findall(rf"`({pattern})`", page.read_text()))


@pytest.fixture(scope="module")
def test_names() -> set[str]:
    """The names of all test functions and test files."""
    names = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for path in (ROOT / "tests").rglob("test_*.py"):
        names.update(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    missing = [
        name
        for name in quoted(page, r"[\w./]+/[\w.]+\.(?:py|md|yaml|sh|json)")
        if not any((root / name).exists() for root in (*ROOTS, page.parent))
    ]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_exist(page: Path, test_names: set[str]) -> None:
    assert quoted(page, r"test_\w+(?:\.py)?") <= test_names


def test_methods_of_the_gateway_exist() -> None:
    (gateway,) = (
        node
        for node in ast.parse((SERVER / "gateway" / "gateway.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Gateway"
    )
    methods = {node.name for node in gateway.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = set(re.findall(r"self\.(\w+)\b", ast.unparse(gateway)))
    for page in PAGES:
        named = set(re.findall(r"\bcall\.gateway\.(\w+)", page.read_text()))
        assert named <= methods | attributes, page.name
