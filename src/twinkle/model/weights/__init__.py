"""Weights on their way from a model that is trained to a sampler: what is offered, and buckets of tensors.

May import ``twinkle.model.decoder`` and what is below it.
"""
