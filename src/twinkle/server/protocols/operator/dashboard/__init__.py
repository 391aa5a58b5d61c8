"""The static files of the dashboard, served by :mod:`twinkle.server.protocols.operator.pages`."""
