"""Randomness of all libraries at once."""

import random
from importlib.util import find_spec
from typing import Any

from twinkle.errors import InvalidInputError

__all__ = ["device_rng_state", "seed_everything", "set_device_rng_state"]

_LARGEST_SEED = 2**32 - 1  # what numpy takes


def seed_everything(seed: int = 42, full_determinism: bool = False) -> None:
    """Seed Python, numpy and, where it is installed, torch on all devices.

    ``full_determinism`` also makes torch choose deterministic kernels, and warn where there is none. Their workspace is
    set up when CUDA starts: for that, start the process with CUBLAS_WORKSPACE_CONFIG=:16:8.
    """
    if not 0 <= seed <= _LARGEST_SEED:
        raise InvalidInputError("seed", seed, f"an integer from 0 to {_LARGEST_SEED}")
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    if find_spec("torch") is not None:
        _seed_torch(seed, full_determinism)


def _seed_torch(seed: int, full_determinism: bool) -> None:
    import torch

    torch.manual_seed(seed)  # all devices
    if full_determinism:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def device_rng_state(device_type: str) -> Any:
    """The random state of this process on its ``device_type``, a tensor; None where there is no such device."""
    import torch

    if device_type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device_type)
    return module.get_rng_state() if module.is_available() else None


def set_device_rng_state(device_type: str, state: Any) -> None:
    import torch

    if device_type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device_type).set_rng_state(state)
