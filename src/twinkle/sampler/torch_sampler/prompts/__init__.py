"""Prompt passes as captured CUDA graphs: the layout of a pass is in tables on the device, not in the graph.

May import the rest of ``torch_sampler`` except ``model_pass`` and what is built on it.
"""
