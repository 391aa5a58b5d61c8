"""Twinkle's own protocol: the verbs of the library on adapters of a server, in the same batches as Tinker's."""
