"""CUDA kernels (Triton) that start before the kernel in front of them has ended.

Between two short kernels the GPU waits about as long as such a kernel runs. CUDA's programmatic dependent launch takes
away a part of that: once all programs of a kernel have called :func:`let_next_start`, those of the next one start.
Until they call :func:`wait_for_previous`, they must not write anything, nor read what other kernels of the same pass
write. Each program must call it, because later kernels rely on it for everything that came before.

All kernels of a pass must be on one stream.
"""

from typing import Any

import torch
import triton
import triton.language as tl

LINE = 128  # bytes of the device's cache that are fetched together


def can_start_early(device: torch.device) -> bool:
    """Return whether kernels can start early on this device: NVIDIA GPUs from Hopper (compute capability 9.0) on."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and hasattr(tl.extra.cuda, "gdc_wait")
    )


def launch_options(early: bool) -> dict[str, Any]:
    """Return the options to launch a kernel with that has the argument ``EARLY``."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait until all earlier kernels have ended, and their writes can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(places):
    """Fetch the lines at these addresses into the device's cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )
