"""States of linear attention between passes: the slots that hold them, and the rows of a pass that read and write them.

May import the cache's ``prefix_cache``, and nothing else of ``torch_sampler``.
"""
