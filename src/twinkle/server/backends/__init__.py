"""The seam between the server and its compute: the protocols of a trainer and a sampler, and how they are loaded.

May import: config and the shared types.
"""
