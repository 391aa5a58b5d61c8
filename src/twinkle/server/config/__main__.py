"""``python -m twinkle.server.config`` prints the tables of docs/configuration.md."""

from twinkle.server.config.reference import tables

print(tables())
