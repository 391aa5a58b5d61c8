"""vLLM's worker for CPUs, with our drawing. vLLM loads the class by its name (``worker_cls``, see engine_args).

It is not in one module with the worker for GPUs, because vLLM's worker for CPUs changes torch when it is imported.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.worker.cpu_worker import CPUWorker

from twinkle.sampler.vllm import samplers, server_watch


class DrawingCpuWorker(CPUWorker):  # type: ignore[misc]  # without vLLM it is Any
    """A worker that ends with the server and draws tokens as the torch sampler does."""

    def init_device(self) -> None:
        server_watch.end_with_server(self.vllm_config.additional_config)
        _leave_out_rows_without_adapter()
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        samplers.install(self)


def _leave_out_rows_without_adapter() -> None:
    """Let vLLM's LoRA for CPUs add nothing to rows without adapter.

    Their index is -1, with which vLLM 0.32 and older read the weights of the last place for adapters. As soon as that
    is taken, samples of the base model were those of another adapter (vllm-project/vllm, pull request 48421).
    """
    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        function = getattr(lora_ops, name)
        if not hasattr(function, "__wrapped__"):  # done already, in a process with several engines
            for module in (lora_ops, punica_cpu):
                setattr(module, name, _with_adapter_only(function))


def _with_adapter_only(function: Callable[..., None]) -> Callable[..., None]:
    """Return the same product, which leaves the outputs of rows without adapter as they are."""

    @functools.wraps(function)
    def product(
        inputs: Tensor, weights: Tensor, outputs: Tensor, adapters: Tensor, *args: object, **how: object
    ) -> None:
        before = outputs.clone()
        function(inputs, weights, outputs, adapters, *args, **how)
        outputs.copy_(torch.where((adapters < 0)[:, None], before, outputs))

    return product
