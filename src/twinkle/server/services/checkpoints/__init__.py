"""Saving, loading, exporting and finding checkpoints."""
