"""The memory plan of a trainer: what a token costs on the loaded model, and how free memory is divided from that."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from twinkle.errors import CapacityError
from twinkle.model.trainer.host_memory import read_host_memory
from twinkle.model.types import DeviceMemory

# Shares of the memory that is left beside the model's weights.
_ACTIVATION_SHARE = 0.6  # of activations, at most
_SHARE_WITHOUT_NEED = 0.3  # of activations, at most, if they are for more than _ENOUGH_TOKENS tokens
_ENOUGH_TOKENS = 4096  # larger batches are hardly faster per token
_RESERVE_SHARE = 0.08  # fragmentation, library workspaces
_CPU_SHARE = 0.5  # of the host memory that is free: other processes need some too
_DEFAULT_MAX_TOKENS = {"cuda": 16384, "cpu": 4096}
_HEAD_CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}  # fp32 logits held at once
_LOGIT_BYTES = 24  # of a logit that a request keeps: its value twice, its slope, and copies of a chunk
_SMALLEST_CHUNK = 16
_CHUNK_TILE = {"cuda": 256, "cpu": 16}  # matrix products compute this many rows at a time, needed or not


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes for weights, adapters and activations, and how many tokens a batch may have."""

    weights: int
    adapters: int
    activations: int
    bytes_per_token: int
    bytes_per_token_recomputed: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        return min(self.max_tokens, self.most_tokens)

    @property
    def most_tokens(self) -> int:
        return self.activations // self.bytes_per_token

    @property
    def logits(self) -> int:
        """Return how many logits of one sequence may be held at once: they take at most half of the activations."""
        return self.activations // (2 * _LOGIT_BYTES)

    @property
    def tokens_recomputed(self) -> int:
        return self.activations // self.bytes_per_token_recomputed

    def __str__(self) -> str:
        gib = 2**30
        return (
            f"memory: weights {self.weights / gib:.2f} GiB, adapters {self.adapters / gib:.2f} GiB, "
            f"activations {self.activations / gib:.2f} GiB = {self.tokens} tokens per batch "
            f"({self.bytes_per_token / 1024:.0f} KiB per token; recomputed: {self.tokens_recomputed} tokens)"
        )


def available_bytes(device: torch.device, processes: int = 1) -> int:
    """Return the bytes of the device that this process may plan with.

    On a GPU they are the free ones; memory cached by torch's allocator is freed first. On the CPU they are half of the
    free host memory, divided by ``processes``, the number of processes that are assumed to share it.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return int(_available_host_bytes() * _CPU_SHARE) // processes


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory numbers of a GPU without synchronizing with it; None on CPUs."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # far cheaper than the flat ones
    return DeviceMemory(
        allocated=stats["allocated_bytes"]["all"]["current"],
        reserved=stats["reserved_bytes"]["all"]["current"],
        total=torch.cuda.get_device_properties(device).total_memory,
    )


def _available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process could still allocate, within the limits of its container.

    File cache that the kernel can drop counts as free.
    """
    return read_host_memory(root).free


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes that a module's parameters take.

    On CUDA whole memory blocks count, because some weights have spare rows behind them. On a host a block can be a file
    that is mapped into memory, of which parameters are a part.
    """
    on_host = sum(parameter.nbytes for parameter in module.parameters() if not parameter.is_cuda)
    blocks = (parameter.untyped_storage() for parameter in module.parameters() if parameter.is_cuda)
    return on_host + sum({block.data_ptr(): block.nbytes() for block in blocks}.values())


def head_chunk_rows(device: torch.device, vocab_size: int) -> int:
    rows = _HEAD_CHUNK_BYTES[device.type] // (4 * vocab_size)
    tile = _CHUNK_TILE[device.type]
    return max(_SMALLEST_CHUNK, rows // tile * tile)


def divide(
    *,
    weights: int,
    free: int,
    per_token: int,
    per_token_recomputed: int,
    max_tokens: int | None,
    device: torch.device,
    others: bool = True,
) -> MemoryPlan:
    """Divide ``free``, the bytes beside the weights, less a reserve of 8 %, between adapters and activations.

    Activations get what ``max_tokens`` tokens need, but at least 25 % and at most 60 %. Without ``max_tokens`` the aim
    is 16384 tokens on CUDA and 4096 on CPU; what 4096 tokens need is given up to 60 %, what more tokens need only up to
    30 %, because adapters and a sampler's cache, which get the rest, need it more. others: whether there are adapters
    or a cache; if not, the limit of 30 % does not apply.
    """
    usable = int(free * (1 - _RESERVE_SHARE))
    wanted = max_tokens if max_tokens is not None else _DEFAULT_MAX_TOKENS[device.type]
    needed = wanted * per_token
    if max_tokens is None and others:
        needed = max(min(wanted, _ENOUGH_TOKENS) * per_token, min(needed, int(usable * _SHARE_WITHOUT_NEED)))
    activations = min(int(usable * _ACTIVATION_SHARE), max(needed, usable // 4))
    plan = MemoryPlan(weights, usable - activations, activations, per_token, per_token_recomputed, wanted)
    if plan.tokens < 1:
        raise CapacityError(
            f"{free / 2**20:.0f} MiB are left beside the model's weights; "
            f"one token needs {per_token / 2**20:.1f} MiB of activations"
        )
    return plan


def measure_per_token(run: Callable[[int], None], device: torch.device, small: int, large: int) -> int:
    """Return the bytes per token of a forward and backward pass, measured by two runs of different length."""
    if device.type == "cuda":
        run(small)  # warm up: load kernels, fill caches
        held = [_cuda_peak(run, tokens, device) for tokens in (small, large)]
    else:
        # Beside what autograd keeps, a pass holds a few temporaries of its widest layer.
        held = [int(1.3 * _saved_bytes(run, tokens)) for tokens in (small, large)]
    return max(1, (held[1] - held[0]) // (large - small))


def _cuda_peak(run: Callable[[int], None], tokens: int, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(tokens)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _saved_bytes(run: Callable[[int], None], tokens: int) -> int:
    """Return the bytes that autograd keeps for the backward pass.

    They include weights, whose size does not depend on the length and cancels out between two runs.
    """
    storages: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        run(tokens)
    return sum(storages.values())
