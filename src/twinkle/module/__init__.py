"""Parts of training for which torch has no equivalent."""
