"""For CUDA kernels (Triton) that start before the kernel ahead of them has finished.

Between two short kernels a GPU idles about as long as one of them runs. CUDA's programmatic dependent launch removes a
part of this gap: once all programs of a kernel have called :func:`let_next_start`, those of the next one start. Until
they call :func:`wait_for_previous`, they must not write anything, nor read what other kernels of the same pass write.
Each program must call it, because later kernels rely on it for everything that came before.

All kernels of a pass must be on one stream.
"""

from typing import Any

import torch
import triton
import triton.language as tl


def can_start_early(device: torch.device) -> bool:
    """Return whether kernels can start early on this device: NVIDIA GPUs from Hopper (compute capability 9.0) on."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and hasattr(tl.extra.cuda, "gdc_wait")
    )


def launch_options(early: bool) -> dict[str, Any]:
    """Return the launch options of a kernel that has the argument ``EARLY``."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Allow the next kernel to start, when all programs of this one have called this."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait until all earlier kernels have ended, and their writes can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
