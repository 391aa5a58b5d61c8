"""Encoding and decoding of the Tinker protocol: protobuf and JSON on one side, the services' dataclasses on the other.

Nothing here does I/O or knows about HTTP connections.
"""
