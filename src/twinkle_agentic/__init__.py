"""Training of agents: tools that a model calls, environments that reward actions, conversations of several turns.

tools      tools, and a manager that runs them by name
envs       environments that reward actions, and their use as tools
rollout    conversations: the model is sampled, tools answer, and sampled tokens are never tokenised again
"""
