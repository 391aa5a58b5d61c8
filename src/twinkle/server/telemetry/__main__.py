"""Print the table of docs/observability.md: ``python -m twinkle.server.telemetry``."""

from twinkle.server.telemetry.instruments import table

print(table())
