"""Matrix products that are fast in bf16 also on a CPU without bf16 instructions.

torch computes a bf16 product on such a CPU number by number, some 200 times slower than an fp32 product. The functions
here convert both factors to fp32 and round the result once. That is what hardware with bf16 instructions does: it
multiplies bf16 numbers and adds in fp32. On other devices, and for fp32, they are the functions of torch.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def bf16_is_slow(device_type: str) -> bool:
    """Return whether torch has no fast bf16 products for the devices of a type, because the CPU has no instructions."""
    return device_type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def needs_fp32(factor: Tensor) -> bool:
    """Return whether products of this bf16 factor should be computed in fp32."""
    return factor.dtype == torch.bfloat16 and bf16_is_slow(factor.device.type)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``."""
    if not needs_fp32(x):
        return F.linear(x, weight_OI, bias_O)
    y: Tensor = _LinearInFp32.apply(x, weight_OI, bias_O)
    return y


class _LinearInFp32(torch.autograd.Function):
    """A product in fp32. Until the backward pass it keeps the bf16 factors, where autograd would keep fp32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_OI)  # frozen weights do not need x
        bias = None if bias_O is None else bias_O.float()
        return F.linear(x.float(), weight_OI.float(), bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        dy32, (wants_x, wants_weight, wants_bias) = dy.float(), ctx.needs_input_grad
        dx = (dy32 @ weight_OI.float()).to(dy.dtype) if wants_x else None
        dweight_OI = dbias_O = None
        if wants_weight:
            dweight_OI = (dy32.flatten(0, -2).t() @ x.float().flatten(0, -2)).to(weight_OI.dtype)
        if wants_bias:
            dbias_O = dy32.flatten(0, -2).sum(0).to(dy.dtype)
        return dx, dweight_OI, dbias_O


def mm(left_NK: Tensor, right_KM: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute ``left @ right``; if ``out`` is given, write the product there."""
    if not needs_fp32(left_NK):
        return torch.mm(left_NK, right_KM, out=out)
    product_NM = left_NK.float() @ right_KM.float()
    return product_NM.to(left_NK.dtype) if out is None else out.copy_(product_NM)


def add_product(out: Tensor, left: Tensor, right: Tensor, *, beta: int = 1) -> Tensor:
    """Compute ``out = beta · out + left @ right`` in place, for matrices or for batches of matrices.

    With beta 0, ``out`` is not read.
    """
    if needs_fp32(left):
        product = left.float() @ right.float()
        return out.add_(product) if beta else out.copy_(product)
    add = torch.addmm if out.dim() == 2 else torch.baddbmm
    return add(out, left, right, beta=beta, out=out)


def add_outer_products(out_NM: Tensor, left_RN: Tensor, right_RM: Tensor) -> None:
    """Compute ``out += left.T @ right`` in place, adding up in fp32. ``out`` is fp32, the factors are bf16 or fp32."""
    if left_RN.is_cuda and left_RN.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(out_NM, left_RN.t(), right_RM, torch.float32, out=out_NM)
    else:
        out_NM.addmm_(left_RN.float().t(), right_RM.float())
