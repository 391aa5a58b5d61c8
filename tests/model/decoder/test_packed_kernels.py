"""Our own kernels of packed attention, compared with the plain formula, with gradients.

They run on CUDA, and without it in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1.
"""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)

from twinkle.model.decoder.attention import plain_attention
from twinkle.model.decoder.packed_attention import attend, tile_table

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (5, 1, 140, 64, 65)
HEADS, KV_HEADS, SIZE = 4, 2, 64
SINKS = (-1.0, 0.5, 2.0, 9.0)


def formula(given: list[Tensor], window: int | None, scale: float) -> Tensor:
    """Return the attention of each sequence by the plain formula, in fp32."""
    outputs, start = [], 0
    for length in LENGTHS:
        q, k, v = (x[start : start + length].float().transpose(0, 1)[None] for x in given[:3])
        distance = torch.arange(length, device=DEVICE)[:, None] - torch.arange(length, device=DEVICE)
        mask = (distance >= 0) & (distance < (window or length))
        sinks = given[3][:, None, None] if len(given) > 3 else None
        outputs.append(plain_attention(q, k, v, mask, scale, None, sinks)[0].transpose(0, 1))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 2, 64, 100])
def test_windows_and_sinks(window: int | None, has_sinks: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    inputs = [torch.randn(sum(LENGTHS), heads, SIZE).to(DEVICE, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    if has_sinks:
        inputs.append(torch.tensor(SINKS).to(DEVICE, dtype))
    tiles = torch.from_numpy(tile_table(LENGTHS)).to(DEVICE)
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    out = attend(*ours[:3], tiles, 0.15, window, ours[3] if has_sinks else None)
    expected = formula(theirs, window, 0.15)
    slope = torch.randn(out.shape).to(DEVICE, dtype)
    bound = 0.01 if DEVICE == "cuda" else 1e-5
    pairs = zip(
        [out, *torch.autograd.grad(out, ours, slope)],
        [expected, *torch.autograd.grad(expected, theirs, slope.float())],
        strict=True,
    )
    for left, right in pairs:
        assert (left - right).float().norm() <= bound * right.float().norm()
