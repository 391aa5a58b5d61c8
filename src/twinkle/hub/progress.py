"""Says on stderr what a slow download or conversion is doing."""

import sys

__all__ = ["announce"]


def announce(stage: str) -> None:
    """One line per stage; stdout stays free for the program's own output."""
    print(f"twinkle: {stage}", file=sys.stderr, flush=True)
