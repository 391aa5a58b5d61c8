"""The files of the dashboard, which :mod:`twinkle.server.protocols.operator.dashboard_routes` serves as they are."""
