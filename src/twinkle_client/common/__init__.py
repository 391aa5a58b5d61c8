"""Compatibility path: scripts and servers import :mod:`twinkle_client.common.serialize` from here."""
