"""Rotary positions: queries and keys are turned by one CUDA kernel instead of a dozen.

Model code turns them by a function of Transformers, ``q · cos + rotate_half(q) · sin``, whose steps are a pass over
memory each; the derivative takes twice as many. The attention modules that call it get a copy of their ``forward`` that
calls ours instead, so other models in the process are not affected. Elsewhere than on CUDA, and for positions of
another form, ours calls Transformers' function.

Shapes: N heads of queries and J of keys, T rows, D numbers of a head.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "apply_rotary_pos_emb"  # what Transformers calls the function, in the file of each family
_BYTES = 16  # that the rows of a kernel's operands are multiples of

Turn = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotary(model: nn.Module) -> int:
    """Let the attention modules of a model use the kernel, and return how many do."""
    fused = 0
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or "forward" in vars(module):
            continue
        theirs = forward.__globals__.get(_NAME)
        if theirs is None or _NAME not in forward.__code__.co_names:
            continue
        if theirs.__module__.startswith("transformers") and _is_usual(theirs):
            module.forward = MethodType(_with_kernel(forward, theirs), module)
            fused += 1
    return fused


def _with_kernel(forward: FunctionType, theirs: Turn) -> Callable[..., Any]:
    """Return a method that does what the method ``forward`` of a class does, with our function instead of theirs.

    In compiled code it is the method of the class, because the compiler fuses steps itself; and also if the class, or
    a function that the method calls, was replaced since.
    """
    used = {name: forward.__globals__[name] for name in forward.__code__.co_names if name in forward.__globals__}
    names = {**forward.__globals__, _NAME: _ours(theirs)}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__

    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        of_class: Callable[..., Any] = type(module).forward
        replaced = of_class is not forward or any(forward.__globals__.get(name) is not used[name] for name in used)
        if replaced or torch.compiler.is_compiling():
            return of_class(module, *args, **kwargs)
        return own(module, *args, **kwargs)

    return method


@cache
def _is_usual(theirs: Turn) -> bool:
    """Return whether a function turns whole heads, whose second half belongs to the first."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 3, 4, 8, generator=generator)
    cos, sin = torch.randn(2, 1, 4, 8, generator=generator)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    try:
        found = theirs(q, k, cos, sin)
    except (TypeError, RuntimeError):  # other arguments, or other shapes
        return False
    return all(torch.allclose(ours, turned(x), atol=1e-5) for ours, x in zip(found, (q, k), strict=True))


@cache
def _ours(theirs: Turn) -> Turn:
    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if args or kwargs or not _fits(q, k, cos, sin):
            return theirs(q, k, cos, sin, *args, **kwargs)
        return turn_heads(q, k, cos, sin)

    return turn


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernel can turn these: one packed row of sequences, and positions for whole heads."""
    one_row = (1, q.shape[-2], q.shape[-1])
    return (
        q.is_cuda
        and q.dim() == k.dim() == 4
        and cos.shape == sin.shape == one_row
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and len(q) == 1
        and all(each.stride(-1) == 1 and each.shape[-1] * each.itemsize % (2 * _BYTES) == 0 for each in (q, k))
    )


def turn_heads(q_1NTD: Tensor, k_1JTD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys turned to their positions; the products are rounded once."""
    turned: tuple[Tensor, Tensor] = _Turn.apply(q_1NTD, k_1JTD, cos_1TD.contiguous(), sin_1TD.contiguous())
    return turned


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_1NTD: Tensor, k_1JTD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor) -> tuple[Tensor, Tensor]:
        from twinkle.model.decoder.fused.rotary_kernels import turn  # needs Triton, which CUDA builds of torch have

        ctx.save_for_backward(cos_1TD, sin_1TD)
        return turn(q_1NTD, k_1JTD, cos_1TD, sin_1TD, back=False)

    @staticmethod
    def backward(ctx: Any, dq_1NTD: Tensor, dk_1JTD: Tensor) -> tuple[Tensor | None, ...]:
        from twinkle.model.decoder.fused.rotary_kernels import turn

        cos_1TD, sin_1TD = ctx.saved_tensors
        dq_1NTD, dk_1JTD = (each if each.stride(-1) == 1 else each.contiguous() for each in (dq_1NTD, dk_1JTD))
        return *turn(dq_1NTD, dk_1JTD, cos_1TD, sin_1TD, back=True), None, None
