"""Parts of training that torch has no equivalent of."""
