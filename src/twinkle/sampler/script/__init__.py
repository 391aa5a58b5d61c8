"""Samplers for scripts: the samplers of the server behind the interface of the library, in the script's own process."""
