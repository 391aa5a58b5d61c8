"""Custom losses: a tenant's loss as a graph of named operations. It is data that is interpreted, never run as code.

nodes         the data types of a graph
catalog       the operations that a graph may use, by name
bounds        the maximum size of each operation's result, known before it is computed
operations    the function behind each operation
weights       the cost of each operation relative to a sum
interpreter   evaluates a graph over the log-probabilities of one sequence
estimate      the cost of an evaluation, from the shapes of its inputs

nodes, catalog and weights do not import torch, so that a process without torch can check a graph.
"""
