"""The Chinese README says the same as the English one: the same commands, code, links, sections and tables."""

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README_ZH.md"
PAGES = [ENGLISH, CHINESE]


def code_blocks(page: Path) -> list[tuple[str, list[str]]]:
    """Return the language and the lines of each block, without comments, which are translated."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(language, [re.sub(r"\s*#.*$", "", line) for line in text.splitlines()]) for language, text in blocks]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)]+)\)", prose(page)) if not link.startswith("README")]


def test_code_is_the_same() -> None:
    assert code_blocks(CHINESE) == code_blocks(ENGLISH)
    assert len(code_blocks(ENGLISH)) > 3


def test_links_are_the_same() -> None:
    assert links(CHINESE) == links(ENGLISH)


def test_names_in_the_text_are_the_same() -> None:
    """Names of commands, packages and routes are not translated."""
    named = [re.findall(r"`([^`\n]+)`", prose(page)) for page in PAGES]
    assert sorted(named[0]) == sorted(named[1])


def test_sections_and_tables_have_the_same_form() -> None:
    headings = [re.findall(r"^(#+) ", prose(page), re.MULTILINE) for page in PAGES]
    assert headings[0] == headings[1]
    rows = [[line.count("|") for line in prose(page).splitlines() if line.startswith("|")] for page in PAGES]
    assert rows[0] == rows[1]
    lists = [len(re.findall(r"^- ", prose(page), re.MULTILINE)) for page in PAGES]
    assert lists[0] == lists[1]


def test_each_links_to_the_other() -> None:
    assert ENGLISH.read_text().startswith("# Twinkle\n\n[中文](README_ZH.md)\n")
    assert CHINESE.read_text().startswith("# Twinkle\n\n[English](README.md)\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert [link for link in links(page) if not (ROOT / link.partition("#")[0]).exists()] == []
