"""Randomness of all libraries at once."""

import random
from importlib.util import find_spec

from twinkle.errors import InvalidInputError

__all__ = ["seed_everything"]

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
