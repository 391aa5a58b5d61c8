"""A loss that somebody else wrote, as a graph of named operations: data that is interpreted, never run as code.

nodes         what a graph is made of
catalog       the operations there are, by name
bounds        how large the result of each may get, before it is computed
operations    what each of them computes
weights       how much longer than a sum each takes
interpreter   one graph over the log-probabilities of one sequence
estimate      what that will cost, by the shapes of its inputs

nodes, catalog and weights work without torch, so that a server can check a graph where no tensors are.
"""
