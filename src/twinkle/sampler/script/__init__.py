"""Samplers for scripts: the server's samplers behind the library's interface, running in the script's own process."""
