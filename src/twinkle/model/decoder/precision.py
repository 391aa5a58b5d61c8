"""Choose the number format of a model, bf16 or fp32: as the caller asks, else by the hardware.

Library and server both choose here. bf16 is the default on GPUs and other accelerators, and on a CPU that has
instructions for it. On another CPU bf16 saves memory, but no time.
"""

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from twinkle.errors import InvalidInputError
from twinkle.model.decoder.products import bf16_is_slow

__all__ = ["DefaultDtype", "cpu_instructions", "default_dtype", "hide_bf16_trace", "read_dtype"]

logger = logging.getLogger(__name__)

_CPU_FACTS = Path("/proc/cpuinfo")
# What Linux calls the instructions that multiply bf16 numbers: two of x86, one of Arm.
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}


@dataclass(frozen=True)
class DefaultDtype:
    """The default number format of a device, and the reason, as the end of a log line."""

    name: str
    why: str

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.name]


def cpu_instructions() -> str | None:
    """Return the name of this CPU's best bf16 instructions; None if it has none that torch uses, or is unknown."""
    try:
        facts = _CPU_FACTS.read_text()
    except OSError:  # not Linux
        return None
    # "flags: …" on x86, "Features: …" on Arm; all cores of a machine have the same
    words = {word for line in facts.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    found = next((name for name in _INSTRUCTIONS if name in words), None)
    return None if bf16_is_slow("cpu") else found


def default_dtype(device: torch.device) -> DefaultDtype:
    """Return the number format for a device."""
    if device.type != "cpu":
        return DefaultDtype("bf16", f"the default on {device.type}")
    instructions = cpu_instructions()
    if instructions is None:
        return DefaultDtype("fp32", "because this CPU has no bf16 instructions")
    return DefaultDtype("bf16", f"because this CPU has instructions for it ({instructions})")


def hide_bf16_trace() -> None:
    """Hide torch's warning about bf16 products on a CPU without instructions for them: it is a C++ stack trace.

    For models that compute in bf16 because the caller wants that; the caller was told that it is slow.
    """
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


def read_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return bf16 or fp32 as a torch dtype, given by name or as a dtype; None means the device's default."""
    if dtype is None:
        default = default_dtype(device)
        logger.info("dtype: %s, %s", default.name, default.why)
        return default.dtype
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in _DTYPES.values():
        raise InvalidInputError("dtype", dtype, f"one of {', '.join(sorted(_DTYPES))}")
    return chosen
