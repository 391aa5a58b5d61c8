"""Ray actors that compute for a replica of a model: the ranks of a trainer, and an engine that samples.

Beside each is the object by which the replica calls it. May import: ``gpu_reservations``, ``replica`` and the rooms
below the runtime.
"""
