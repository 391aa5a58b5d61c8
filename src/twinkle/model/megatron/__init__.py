"""Training with megatron-core: tensor, pipeline, sequence and expert parallelism.

One process runs one pipeline stage of the model, and holds a cut of its weights. This room may import all other rooms
of the model except those of other backends. Only :mod:`.mcore` imports megatron-core.
"""
