"""The multi-tenant Trainer: from requests to packed batches, through the model and back to results.

``trainer`` is the entry point and owns the adapters; ``preparation`` makes a base model ready for it. ``call`` runs the
requests of one call (``request``) through ``packing``, ``batch`` and ``engine``. ``memory``, ``host_memory`` and
``probe`` find out how much fits the device, and ``self_check`` tests new model families. ``agreement``,
``shard_requests``, ``lockstep`` and ``sharding`` are for several processes.
"""
