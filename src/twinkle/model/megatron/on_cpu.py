"""Lets megatron-core's pipeline schedules run where torch has no CUDA, so that they can be tested on a CPU.

The schedules and their communication between stages (megatron-core 0.16) allocate two kinds of tensors on CUDA without
asking for the device of the model: a token counter, once a call, and the buffers that receive activations. There is no
option for it. :func:`megatron_on_cpu` sends these allocations to the CPU while a schedule runs. It replaces two
functions of ``torch.cuda`` for that time, which is the one exception to the rule that nothing is patched; it is entered
only around a schedule, and does nothing where torch has CUDA.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["megatron_on_cpu"]


class _CudaToCpu(TorchFunctionMode):
    """Calls torch functions with ``device="cpu"`` in place of a CUDA device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda":
            options["device"] = torch.device("cpu")
        return func(*args, **options)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run a schedule of megatron-core on the CPU inside the ``with`` block; no effect where torch has CUDA."""
    if torch.cuda.is_available():
        yield
        return
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_, **__: None
    try:
        with _CudaToCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize
