"""Print the tables of docs/configuration.md: ``python -m twinkle.server.config``."""

from twinkle.server.config.reference import tables

print(tables())
