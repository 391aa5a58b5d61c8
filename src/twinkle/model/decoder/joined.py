"""Weights of linear layers that have the same input, side by side in memory, so that one product serves them all.

In layers of the Llama shape there can be spare rows behind the weights, also behind those of a linear layer alone. A
sampler copies the A of adapters there, and the same product computes x A.T, too.

Every layer keeps its own parameter, which becomes a view of the joint tensor: there is no second copy, and checkpoints,
copies in place and the layers themselves work as before. Code that computes one product calls :func:`joint` each time,
because a parameter may be pointed to other memory, and then the weights no longer follow each other.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # names of layers that have the same input
_ALONE = (("o_proj",), ("down_proj",))
# Decoder layers of Transformers that compute what Llama's do, except for biases, norms of heads, and windows.
LLAMA_SHAPED = frozenset(
    {
        "LlamaDecoderLayer",
        "MistralDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen2_5_VLDecoderLayer",
        "Qwen3DecoderLayer",
        "Qwen3VLTextDecoderLayer",
    }
)
SPARE_ROWS = 128  # for each linear layer
# An attribute of the first parameter of a block with spare rows: the block's address, and how many parameters it has.
_BLOCK = "_twinkle_block_with_spare_rows"


def join_weights(model: nn.Module, *, spare_rows: bool = False) -> int:
    """Move the weights of layers with the same input together, and return how many memory blocks this made.

    spare_rows: leave ``SPARE_ROWS`` for each linear layer behind the weights, in decoder layers of the Llama shape.
    Only for a model whose parameters no other code uses: tensors that shared memory with them do not do so afterwards.
    """
    count = 0
    layers = [layer for layer in model.modules() if spare_rows and type(layer).__name__ in LLAMA_SHAPED]
    inside = {module for layer in layers for module in layer.modules()}
    for module in model.modules():
        rows = SPARE_ROWS if module in inside else 0
        for names in (*TOGETHER, *_ALONE) if rows else TOGETHER:
            linears = [module._modules.get(name) for name in names]
            if all(type(linear) is nn.Linear for linear in linears):
                for kind in ("weight", "bias"):
                    count += _join([linear._parameters[kind] for linear in linears if linear is not None], rows)
    return count


def _join(parameters: Sequence[nn.Parameter | None], spare_rows: int) -> int:
    """Move parameters together, with spare rows for each behind them; return 1 if that was possible, else 0."""
    present = [parameter for parameter in parameters if parameter is not None]
    alike = len({(parameter.shape[1:], parameter.dtype, parameter.device) for parameter in present}) == 1
    if len(present) < len(parameters) or not alike:
        return 0
    sizes = [len(each) for each in present]
    whole = present[0].new_zeros(sum(sizes) + spare_rows * len(present), *present[0].shape[1:], requires_grad=False)
    for parameter, part in zip(present, whole.split([*sizes, spare_rows * len(present)]), strict=False):
        part.copy_(parameter.detach())
        parameter.data = part
    if spare_rows:
        setattr(present[0], _BLOCK, (_storage(whole), len(present)))
    if whole.is_cuda:  # give back the old memory: it is in pieces that are too small for the next joint tensors
        torch.cuda.empty_cache()
    return 1


def joint(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors as one, joined along the first dimension, if they follow each other in one memory block."""
    first = tensors[0]
    end = first.data_ptr()
    for each in tensors:
        same = each.dtype == first.dtype and each.shape[1:] == first.shape[1:] and each.is_contiguous()
        if not same or each.data_ptr() != end or _storage(each) != _storage(first):
            return None
        end += each.nbytes
    return first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def with_spare_rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return what :func:`joint` returns, and the spare rows behind it; None if there are none.

    Only the parameters that :func:`join_weights` moved have spare rows, not others that were pointed to their memory.
    """
    whole = joint(tensors)
    if whole is None or getattr(tensors[0], _BLOCK, None) != (_storage(whole), len(tensors)):
        return None
    return whole.as_strided((len(whole) + SPARE_ROWS * len(tensors), *whole.shape[1:]), whole.stride())


def empty_like(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return new tensors of the same shapes. Weights that follow each other in memory do so in the copy, too."""
    copies: dict[str, Tensor] = {}
    by_storage: dict[int, list[str]] = {}
    for name, weight in weights.items():
        by_storage.setdefault(_storage(weight), []).append(name)
    for names in by_storage.values():
        ordered = sorted(names, key=lambda name: weights[name].data_ptr())
        whole = joint([weights[name] for name in ordered]) if len(names) > 1 else None
        if whole is None:
            copies |= {name: torch.empty_like(weights[name]) for name in names}
        else:
            sizes = [len(weights[name]) for name in ordered]
            copies |= zip(ordered, torch.empty_like(whole).split(sizes), strict=True)
    return {name: copies[name] for name in weights}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
