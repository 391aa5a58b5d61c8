"""``python -m twinkle.server.telemetry`` prints the table of docs/observability.md."""

from twinkle.server.telemetry.instruments import table

print(table())
