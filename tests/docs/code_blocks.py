"""The code blocks of all pages, and the markers of those that no test can run.

A block is marked by a comment on the line before it: ``<!-- fragment: what it needs -->``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "README_ZH.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "cookbook").rglob("README.md")),
    *sorted((ROOT / "deploy").rglob("README.md")),
]
# What each language of a block means here. Blocks of "text" are diagrams and outputs, not code.
LANGUAGES = ("python", "console", "sh", "yaml", "json", "http", "text")
_BLOCK = re.compile(
    r"^(?:<!-- fragment: (?P<reason>[^\n]+?) -->\n)?(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A code block. ``line``: the number of its first line on the page. ``reason``: why no test runs it, or None."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    content = page.read_text()
    return [
        Block(page, content[: found.start("text")].count("\n") + 1, found["language"], found["text"], found["reason"])
        for found in _BLOCK.finditer(content)
    ]


def blocks(*languages: str, fragments: bool = False) -> list[Block]:
    """Return the blocks of all pages in these languages. ``fragments``: with those that are marked as fragments."""
    found = [block for page in PAGES for block in blocks_of(page) if block.language in languages]
    return [block for block in found if fragments or block.reason is None]


def ids(of: Sequence[Block]) -> list[str]:
    return [block.name for block in of]
