"""The environment itself."""
