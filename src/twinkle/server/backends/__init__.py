"""The seam between the server and what computes: the protocols of a trainer and a sampler, and how they are loaded.

May import: config and the nouns.
"""
