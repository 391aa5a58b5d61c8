"""The table of metrics in docs/observability.md. ``python -m twinkle.server.telemetry`` prints it."""

from twinkle.server.telemetry.instruments import INSTRUMENTS, Instrument

__all__ = ["table"]


def table() -> str:
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, INSTRUMENTS)])


def _row(instrument: Instrument) -> str:
    labels = ", ".join(f"`{label}`" for label in instrument.labels)
    return f"| `{instrument.name}` | {instrument.kind} | {labels} | {instrument.meaning} |".replace("  ", " ")
