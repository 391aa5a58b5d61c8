"""``python -m twinkle.server.telemetry`` prints the table of docs/observability.md."""

from twinkle.server.telemetry.reference import table

print(table())
