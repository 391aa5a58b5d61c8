"""Decides whether kernels are used: they must run on this device, and give what plain operations give."""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def kernels_agree(without: str, compare: Callable[[], Iterable[tuple[Tensor, Tensor]]], limit: float) -> bool:
    """Return whether tensors from kernels equal the expected ones; if they cannot be computed, they do not.

    ``compare`` returns pairs of both, and ``limit`` is for ‖found - expected‖ / ‖expected‖. ``without`` begins the
    warning of the log that says why kernels are not used. If their package is not installed, there is none.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            differences = [_difference(found, expected) for found, expected in compare()]
    except ImportError:
        return False
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, plain operations compute the same
        logger.warning("%s: %s", without, str(error).split("\n")[0])
        return False
    too_large = [each for each in differences if not each <= limit]  # NaN is not small either
    if too_large:
        logger.warning("%s: the numbers differ by %.1e", without, too_large[0])
    return not too_large


def _difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())
