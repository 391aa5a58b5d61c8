"""Code for prompts only: their scores, and their passes as captured CUDA graphs, whose layout is in tables.

May import the rest of ``torch_sampler`` except ``jobs``, ``model_pass`` and what is built on these.
"""
