"""Drawing from whole distributions as two CUDA kernels (Triton), which read the logits once.

Written with torch's operations, a draw passes over the logits a dozen times and holds several copies of them. The rule
is that of ``drawing.pick``: the first token at which the running sum of the weights exceeds u · total. The weights of a
chunk are summed in fp32, the sums of chunks in float64.

Shapes: M rows, V vocabulary, C chunks of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 256  # vocabulary entries that are summed first
_CHUNKS_AT_ONCE = 16


def draw_from_whole(logits_MV: Tensor, divisor_M: Tensor, greedy_M: Tensor, uniform_M: Tensor, choices: int) -> Tensor:
    """Return tokens, log-probabilities and whether the row is finite, (3, M) float64.

    divisor: divides the logits, float64. greedy: 1 for the likeliest token, else 0; float64. uniform: float64. Tokens
    from ``choices`` on are never drawn.
    """
    rows, size = logits_MV.shape
    chunks = triton.cdiv(size, _CHUNK)
    sums_M4C = torch.empty(rows, 4, chunks, dtype=torch.float32, device=logits_MV.device)
    values_3M = torch.empty(3, rows, dtype=torch.float64, device=logits_MV.device)
    _sum_chunks[(triton.cdiv(chunks, _CHUNKS_AT_ONCE), rows)](
        sums_M4C,
        logits_MV,
        divisor_M,
        logits_MV.stride(0),
        divisor_M.stride(0),
        size,
        choices,
        chunks,
        CHUNK=_CHUNK,
        CHUNKS=_CHUNKS_AT_ONCE,
        num_warps=8,
    )
    _pick[(rows,)](
        values_3M,
        sums_M4C,
        logits_MV,
        divisor_M,
        greedy_M,
        uniform_M,
        logits_MV.stride(0),
        divisor_M.stride(0),
        greedy_M.stride(0),
        uniform_M.stride(0),
        size,
        choices,
        chunks,
        rows,
        CHUNK=_CHUNK,
        ROOM=triton.next_power_of_2(chunks),
        num_warps=4,
    )
    return values_3M


@triton.jit
def _sum_chunks(
    sums,
    logits,
    divisor,
    logits_row,
    divisor_row,
    size,
    choices,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store four numbers for each chunk: the highest logit, the sum of exp((logit − highest) / divisor) over all its
    tokens, the same sum over the tokens that may be drawn, and the highest logit of those tokens.
    """
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    value = tl.load(logits + row * logits_row + token, mask=token < size, other=float("-inf"))
    by = tl.load(divisor + row * divisor_row).to(tl.float32)
    highest = tl.max(value, 1)
    below = tl.where(highest == float("-inf"), 0.0, highest)  # −∞ − −∞ would be NaN
    weight = tl.exp((value - below[:, None]) / by)
    drawn = token < choices
    place = sums + row * 4 * chunks + chunk
    inside = chunk < chunks
    tl.store(place, highest, mask=inside)
    tl.store(place + chunks, tl.sum(weight, 1), mask=inside)
    tl.store(place + 2 * chunks, tl.sum(tl.where(drawn, weight, 0.0), 1), mask=inside)
    tl.store(place + 3 * chunks, tl.max(tl.where(drawn, value, float("-inf")), 1), mask=inside)


@triton.jit(do_not_specialize=["rows"])  # compiled once for all graphs
def _pick(
    values,
    sums,
    logits,
    divisor,
    greedy,
    uniform,
    logits_row,
    divisor_row,
    greedy_row,
    uniform_row,
    size,
    choices,
    chunks,
    rows,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    by = tl.load(divisor + row * divisor_row).to(tl.float32)
    c = tl.arange(0, ROOM)
    inside = c < chunks
    place = sums + row * 4 * chunks + c
    highest = tl.load(place, mask=inside, other=float("-inf"))
    top = tl.max(highest, 0)
    factor = tl.exp((highest - top) / by).to(tl.float64)
    total = tl.sum(tl.load(place + chunks, mask=inside, other=0.0).to(tl.float64) * factor, 0)
    weight = tl.load(place + 2 * chunks, mask=inside, other=0.0).to(tl.float64) * factor
    ends = tl.cumsum(weight, 0)
    wanted = tl.load(uniform + row * uniform_row) * tl.sum(weight, 0)
    best = tl.argmax(tl.load(place + 3 * chunks, mask=inside, other=float("-inf")), 0)
    is_greedy = tl.load(greedy + row * greedy_row) > 0
    found = tl.minimum(tl.sum((ends <= wanted).to(tl.int32), 0), chunks - 1)
    chunk = tl.where(is_greedy, best, found)
    before = tl.sum(tl.where(c == chunk, ends - weight, 0.0), 0)

    place_in = tl.arange(0, CHUNK)
    token = chunk * CHUNK + place_in
    drawn = token < choices
    value = tl.load(logits + row * logits_row + token, mask=token < size, other=float("-inf"))
    value = tl.where(drawn, value, float("-inf"))
    steps = tl.cumsum(tl.exp((value - top) / by).to(tl.float64), 0)
    # These sums are added in another order and may end slightly lower than the chunk's sum. If the wanted value lies
    # beyond their maximum, take the first index at which they reach it.
    last = tl.min(tl.where(steps == tl.max(steps, 0), place_in, CHUNK - 1), 0)
    step = tl.minimum(tl.sum((steps <= wanted - before).to(tl.int32), 0), last)
    likeliest = tl.min(tl.where(value == tl.max(value, 0), place_in, CHUNK - 1), 0)
    step = tl.where(is_greedy, likeliest, step)
    chosen = tl.minimum(chunk * CHUNK + step, choices - 1)

    logit = tl.load(logits + row * logits_row + chosen)
    finite = (total > 0) & (total < float("inf"))  # False for NaN
    logprob = ((logit - top) / by).to(tl.float64) - tl.log(tl.where(finite, total, 1.0))
    tl.store(values + row, chosen.to(tl.float64))
    tl.store(values + rows + row, logprob)
    tl.store(values + 2 * rows + row, finite.to(tl.float64))
