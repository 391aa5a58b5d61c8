"""A CUDA kernel (Triton) that copies many pieces of memory in one launch.

Shapes: E pieces.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # elements that a program copies at once
_PROGRAMS = 16  # of a piece


def copy_pieces(table_E3: Tensor, like: Tensor) -> None:
    """Copy pieces of memory, whose elements have the type of ``like``.

    table: the address of a piece, the address of its copy, and the number of elements, a multiple of 8; int64, on the
    device. The addresses are multiples of 16.
    """
    _copy[(len(table_E3), _PROGRAMS)](table_E3, like, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _copy(table, like, BLOCK: tl.constexpr):
    place = table + 3 * tl.program_id(0)
    pointer = tl.pointer_type(like.dtype.element_ty)
    source = tl.multiple_of(tl.load(place).to(pointer), 16)
    target = tl.multiple_of(tl.load(place + 1).to(pointer), 16)
    count = tl.load(place + 2) // 8 * 8  # the division tells the compiler that it is such a multiple
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < count
        tl.store(target + k, tl.load(source + k, mask=inside), mask=inside)
