"""Decides whether kernels are used: they must run on this device, and give what plain operations give."""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def kernels_agree(without: str, compare: Callable[[], Iterable[tuple[Tensor, Tensor]]], limit: float) -> bool:
    """Return whether what kernels compute is close to what is expected; False if a kernel fails.

    ``compare`` returns pairs of both, and ``limit`` is for ‖found - expected‖ / ‖expected‖. ``without`` begins the
    warning in the log where kernels are not used. That a package is missing is not logged.
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
