"""The adapters of one base model: accepting their ops, running them in shared batches, recovering them."""
