"""The Triton kernel of attention in decoding with attention sinks, compared with the plain formula.

It runs on CUDA, and without it in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1.
"""

import math
import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)

from twinkle.sampler.torch_sampler import attention_kernels
from twinkle.sampler.torch_sampler.cache import BLOCK

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 17, 64, 130)
WIDE = 9  # blocks of a sequence


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 64), (2, 2, 24)])
def test_sinks(
    parts: int, window: int | None, heads: int, kv_heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "_PROGRAMS", parts * len(LENGTHS) * kv_heads)
    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    count = WIDE * len(LENGTHS)
    table = torch.randperm(count, device=DEVICE).int().view(len(LENGTHS), WIDE)
    keys, values = (torch.randn(count, BLOCK, kv_heads, width, device=DEVICE) for _ in range(2))
    query = torch.randn(len(LENGTHS), heads, width, device=DEVICE)
    sinks = torch.linspace(-2, 9, heads, device=DEVICE)
    out = attention_kernels.attend_one_token(
        query, keys, values, table, lengths, width**-0.5, window, None, sinks_H=sinks
    )
    for row, length in enumerate(LENGTHS):
        first = 0 if window is None else max(0, length - window)
        k, v = (
            x[table[row].long()].flatten(0, 1)[first:length].repeat_interleave(heads // kv_heads, 1).double()
            for x in (keys, values)
        )
        scores = torch.einsum("hd,lhd->hl", query[row].double(), k) / math.sqrt(width)
        weights = scores.exp() / (scores.exp().sum(1) + sinks.double().exp())[:, None]
        expected = torch.einsum("hl,lhd->hd", weights, v)
        torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=2e-5)
