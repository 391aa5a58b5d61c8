"""Norms computed by our kernels, compared with the formula.

They run on CUDA, and without it in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1.
"""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)

from twinkle.model.decoder.fused import norms
from twinkle.model.decoder.fused.norm_kernels import rms_norm, rms_norm_gradient

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = 2e-6


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (70, 64), (33, 96), (3, 2048), (2, 5000)])
def test_norms_and_gradients_are_those_of_the_formula(rows: int, width: int, gated: bool, offset: float) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, gate, slopes = torch.randn(3, rows, width, generator=generator, device=DEVICE)
    x = x * torch.logspace(-3, 3, rows, device=DEVICE)[:, None]  # where eps matters, and where it does not
    weight = torch.randn(width, generator=generator, device=DEVICE)
    given = [each.double().requires_grad_() for each in ((x, gate) if gated else (x,))]
    normed = given[0] * torch.rsqrt(given[0].square().mean(1, keepdim=True) + 1e-6) * (offset + weight.double())
    wanted = normed * torch.nn.functional.silu(given[1]) if gated else normed
    gradients = torch.autograd.grad(wanted, given, slopes.double())
    found = rms_norm(x, gate if gated else None, weight, 1e-6, offset)
    of_x, of_gate = rms_norm_gradient(slopes.contiguous(), x, gate if gated else None, weight, 1e-6, offset)
    pairs = [(found, wanted), (of_x, gradients[0])]
    if of_gate is not None:
        pairs.append((of_gate, gradients[1]))
    assert len(pairs) == 2 + gated
    for ours, exact in pairs:
        by_row = (ours.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert by_row.max() < BOUND


def test_half_precision_is_rounded_once() -> None:
    half = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter computes no bf16
    x = torch.randn(40, 128, device=DEVICE).to(half)
    weight = torch.randn(128, device=DEVICE).to(half)
    wanted = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6) * weight.float()
    found = rms_norm(x, None, weight, 1e-6, 0.0)
    assert found.dtype == half
    assert ((found.float() - wanted).abs() <= wanted.abs() * torch.finfo(half).eps / 2 * 1.01 + 1e-7).all()


@pytest.mark.parametrize("half", [False, True])
def test_the_kernels_are_used_where_they_agree(half: bool) -> None:
    dtype = torch.float32 if not half else torch.bfloat16 if torch.cuda.is_available() else torch.float16
    assert norms._kernels_agree(torch.device(DEVICE), dtype)


@pytest.mark.parametrize("gated", [False, True])
def test_strided_tensors_get_their_gradients(gated: bool) -> None:
    """Heads lie apart in memory, and the gradient of the result has other strides than the result."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, gate, slopes = torch.randn(3, 5, 7, 64, generator=generator, device=DEVICE)
    weight = torch.randn(64, generator=generator, device=DEVICE)
    found = []
    for norm in (norms._KernelNorm.apply, norms._formula):
        given = [each.clone().requires_grad_() for each in ((x, gate) if gated else (x,))]
        turned = [each.transpose(0, 1) for each in given]
        y = norm(turned[0], turned[1] if gated else None, weight, 1e-6, 1.0)
        assert y.shape == (7, 5, 64)
        y += 1  # the result may be changed
        found.append([y.detach(), *torch.autograd.grad(y, given, slopes.transpose(0, 1))])
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).norm() < BOUND * expected.norm()
