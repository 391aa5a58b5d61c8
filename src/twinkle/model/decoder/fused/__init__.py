"""Steps of a model in fewer passes over memory, with the same numbers: norms, and positions of queries and keys."""
