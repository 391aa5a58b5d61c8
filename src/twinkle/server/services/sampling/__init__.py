"""Sampling from a base model or from published versions of its adapters."""
