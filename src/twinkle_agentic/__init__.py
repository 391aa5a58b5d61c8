"""Agents that are trained: tools that a model calls, environments that answer, conversations of several turns.

tools      a tool, and many of them under their names
envs       environments that reward what is done in them, as tools
rollout    conversations: the model is sampled, tools answer, tokens stay as they were sampled
"""
