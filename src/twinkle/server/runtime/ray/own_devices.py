"""The device of a replica, as it sees it."""

from dataclasses import replace

from twinkle.server.config.applications import ServedModelConfig

__all__ = ["on_own_gpu"]


def on_own_gpu(served: ServedModelConfig) -> ServedModelConfig:
    """Ray shows a process its own GPU alone, as number 0: a number of the whole machine would name none there."""
    device = served.model.compute_device
    if device is None or not device.startswith("cuda:"):
        return served
    return replace(served, model=served.model.model_copy(update={"device": "cuda"}))
