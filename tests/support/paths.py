"""Where the repository is, for tests that read its files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PROGRAMS = ROOT / "tests" / "support" / "servers"  # run as processes of their own
