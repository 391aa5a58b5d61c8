"""The files of the dashboard, which :mod:`twinkle.server.protocols.operator.pages` serves as they are."""
