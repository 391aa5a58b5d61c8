"""The files of the dashboard, which :mod:`twinkle.server.routes.dashboard` serves as they are."""
