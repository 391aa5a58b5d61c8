"""Training of agents: tools that a model calls, environments that reward actions, conversations of several turns.

rollout       conversations: the model is sampled, tools answer, and sampled tokens are never tokenised again
preprocessor  steps that filter, clean and score conversations before training
sampler       a sampler that asks another model where its own is not sure
condenser     replaces long pieces of a conversation by shorter ones
chunker       cuts a conversation into pieces
reward        rewards of conversations with tools
envs          environments that reward actions, and their use as tools
protocol      models behind an API
tools         tools, and a manager that runs them by name
data_format   the pieces of a conversation, thoughts, and trace files
"""
