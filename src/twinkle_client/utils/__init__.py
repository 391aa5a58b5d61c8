"""Compatibility path: scripts import :mod:`twinkle_client.utils.patch_tinker` from here."""
