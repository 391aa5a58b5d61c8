"""What commands print: tables for people, JSON for programs.

With ``--json``, standard output has nothing but one JSON value; everything else goes to standard error.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

_LONGEST_CELL = 60
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Rows = Sequence[Mapping[str, object]]


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json`` to a command."""
    parser.add_argument("--json", action="store_true", help="print JSON on standard output, and nothing else there")


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def print_rows(rows: Rows, titles: Mapping[str, str], empty: str) -> None:
    """Print rows as a table with a title for each column; ``empty`` instead of a table without rows.

    ``titles``: the columns to show, with their titles. Numbers are right-aligned.
    """
    if not rows:
        print(empty)
        return
    cells = [[_cell(row[key]) for key in titles] for row in rows]
    lines = [list(titles.values()), *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(titles))]
    right = [all(isinstance(row[key], int | None) for row in rows) for key in titles]
    for line in lines:
        aligned = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        )
        print("  ".join(aligned).rstrip())


def _cell(value: object) -> str:
    """Return a value as one line of text, cut to the width of a column."""
    text = "-" if value is None or value == "" else f"{value:,}" if isinstance(value, int) else str(value)
    text = printable(text)
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"


def printable(text: str) -> str:
    """Return a text with ? for control characters: tenants choose names, which must not control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def size(count: float) -> str:
    """Return a number of bytes in words: ``1.5 GiB``."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def moment(seconds: float | None) -> str | None:
    """Return a time in UTC: ``2026-01-31 12:00:00Z``."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def iso(seconds: float | None) -> str | None:
    """Return a time for programs, in ISO format with its time zone."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def age(seconds: float | None) -> str | None:
    """Return how long ago a time was: ``3 min ago``."""
    if seconds is None:
        return None
    passed = max(0.0, time.time() - seconds)
    for unit, length in (("s", 60.0), ("min", 60.0), ("h", 48.0)):
        if passed < length:
            return f"{passed:.0f} {unit} ago"
        passed /= length if unit != "h" else 24.0
    return f"{passed:.0f} days ago"
