"""A sampler whose versions are complete sets of weights of one model, for models that are trained in all parameters."""

from twinkle.sampler.weight_sets.versions import WeightVersions

__all__ = ["WeightVersions"]
