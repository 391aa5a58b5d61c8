"""The Triton kernels of prompt passes, compared with plain formulas.

They run on CUDA, and without it in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1.
"""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)

from twinkle.sampler.torch_sampler.cache import BLOCK
from twinkle.sampler.torch_sampler.cached_attention import Span
from twinkle.sampler.torch_sampler.prompts.attention_kernels import attend_spans
from twinkle.sampler.torch_sampler.prompts.lora_kernels import add_lora
from twinkle.sampler.torch_sampler.prompts.tables import ATTENTION_ROWS, TILE, Bucket, Layout

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = 120


def layout_of(*spans: tuple[int, int], seed: int = 0) -> Layout:
    """Return spans (start, stop) with random blocks, each block of one sequence alone."""
    free = iter(np.random.default_rng(seed).permutation(np.arange(1, BLOCKS)).tolist())
    return Layout(
        [Span(start, stop, [next(free) for _ in range(-(-stop // BLOCK))]) for start, stop in spans],
        [-1] * len(spans),
    )


def tables_of(layout: Layout, bucket: Bucket) -> dict[str, Tensor]:
    tables = layout.tables(bucket, [np.zeros(span.stop - span.start, np.int64) for span in layout.spans], 0)
    return {name: torch.from_numpy(tables[place]).to(DEVICE) for name, place in bucket.places.items()}


def attention(
    q_LHD: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
):
    """Return the plain attention of queries from position ``first`` on, in float64."""
    repeats = q_LHD.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(repeats, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q_LHD.double(), k) * q_LHD.shape[2] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = (first + torch.arange(len(q_LHD)))[:, None] - torch.arange(len(keys))
    seen = (distance >= 0) & (distance < (len(keys) if window is None else window))
    scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.double()[:, None, None].expand(-1, len(q_LHD), 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., : len(keys)], v)


def random_spans(seed: int) -> list[tuple[int, int]]:
    """Return a mix of fresh and continued spans, of up to 300 rows together."""
    random = np.random.default_rng(seed)
    spans, rows = [], 0
    while True:
        start, length = int(random.integers(0, 150)) * int(random.integers(0, 2)), int(random.integers(1, 120))
        if rows + length > 300:
            return spans
        rows += length
        spans.append((start, start + length))


CASES = [[(0, 1)], [(63, 65), (0, 17), (100, 101), (0, 64)], [(128, 256), (1, 2)], *map(random_spans, range(2))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap", "has_sinks"),
    [
        (2, 1, 64, None, None, False),
        (2, 2, 24, 17, None, False),
        (2, 1, 64, 1, None, False),
        (2, 1, 16, 100, 20.0, False),
        (1, 1, 16, None, 5.0, False),
        (2, 1, 64, None, None, True),
        (2, 2, 16, 17, None, True),
    ],
)
def test_attention_of_spans(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    torch.manual_seed(0)
    sinks = torch.tensor([-0.5, 4.0], device=DEVICE).to(dtype) if has_sinks else None
    for number, spans in enumerate(CASES):
        layout = layout_of(*spans, seed=number)
        bucket = Bucket(384)
        table = tables_of(layout, bucket)
        # views of a wider buffer with NaN in blocks that no span has: no program may read those
        buffer = torch.full((BLOCKS, 2, BLOCK, kv_heads, width), float("nan"), dtype=dtype, device=DEVICE)
        for span in layout.spans:
            buffer[span.blocks] = torch.randn(len(span.blocks), 2, BLOCK, kv_heads, width, device=DEVICE).to(dtype)
            rest = span.stop % BLOCK
            if rest:  # tokens after the end of the sequence
                buffer[span.blocks[-1], :, rest:] = float("nan")
        keys, values = buffer[:, 0], buffer[:, 1]
        q_THD = torch.randn(heads, bucket.rows, width, device=DEVICE).to(dtype).transpose(0, 1)
        used = sum(-(-(span.stop - span.start) // ATTENTION_ROWS) for span in layout.spans)
        tiles = table["attention"].view(-1, TILE)[: used + 2]  # unused ones are slow in the interpreter
        out_THD = attend_spans(q_THD, keys, values, tiles, table["blocks"], width**-0.5, window, softcap, sinks)
        bound = 2e-5 if dtype == torch.float32 else 4e-3
        for span, first in zip(layout.spans, layout.firsts.tolist(), strict=True):
            rows = slice(first, first + span.stop - span.start)
            own = [x[span.blocks].flatten(0, 1)[: span.stop] for x in (keys, values)]
            expected = attention(q_THD[rows], *own, span.start, window, softcap, sinks)
            torch.testing.assert_close(out_THD[rows].double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [64, 768])
def test_lora_of_mixed_versions(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(1)
    ranks, counts, inputs, outputs = [8, 0, 128, 32, 16], [5, 1, 33, 7, 3], 300, 200
    if rows > 64:
        counts = [count * 9 for count in counts]
    spans = [Span(0, count, [1] * 30) for count in counts]
    layout = Layout([*spans, Span(0, 2, [1])], [0, 1, 2, 3, 4, -1])
    bucket = Bucket(rows)
    tiles = tables_of(layout, bucket)["lora"].view(-1, TILE)
    pairs = [
        [(torch.randn(*shape, device=DEVICE) * 0.2).to(dtype) for shape in ((rank, inputs), (outputs, rank))]
        for rank in ranks
    ]
    table = torch.zeros(16, 7, 4, dtype=torch.int64, device=DEVICE)  # the third of seven layers
    for number, ((a_RI, b_OR), rank) in enumerate(zip(pairs, ranks, strict=True)):
        if rank:  # the second version has no LoRA on this layer
            table[number, 2] = torch.tensor([a_RI.data_ptr(), b_OR.data_ptr(), rank, 0])
    x_TI = torch.randn(rows, inputs, device=DEVICE).to(dtype)
    wide = torch.randn(rows, outputs + 50, device=DEVICE)  # y is a part of the rows of a wider matrix
    y_TO, before = wide[:, 20 : 20 + outputs], wide.clone()
    add_lora(x_TI, y_TO, table[:, 2], tiles, bucket.lora_rows)
    expected = before.double()
    for (a_RI, b_OR), first, count in zip(pairs, layout.firsts.tolist(), counts, strict=False):
        part = slice(first, first + count)
        h = (x_TI[part].double() @ a_RI.double().T).to(dtype)
        expected[part, 20 : 20 + outputs] += h.double() @ b_OR.double().T
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(wide.double(), expected, atol=bound, rtol=bound)
    untouched = sum(counts)
    torch.testing.assert_close(wide[untouched:], before[untouched:], atol=0, rtol=0)
