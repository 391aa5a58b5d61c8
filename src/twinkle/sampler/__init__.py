"""Sampling: generate with the base model and with published adapter versions."""
