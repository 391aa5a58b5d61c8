"""Paths of the repository, for tests that read its files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PROGRAMS = ROOT / "tests" / "support" / "servers"  # scripts that tests run as separate processes
