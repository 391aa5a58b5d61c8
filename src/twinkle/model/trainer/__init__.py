"""The multi-tenant Trainer: from requests to packed batches, through the model and back to results.

``trainer`` is the entrance and owns the adapters; ``call`` runs one request through ``packing``, ``batch`` and
``engine``. The rest is about fitting the device: ``memory``, ``rehearsal``, ``self_check``, and several processes.
"""
