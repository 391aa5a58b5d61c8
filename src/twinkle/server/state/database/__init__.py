"""The tables, the two databases they can be in, and the journal beside them."""
