"""SiLU of the convolution of linear attention by our kernels, compared with the formula.

They run on CUDA, and without it in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1.
"""

import os

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)

from twinkle.model.decoder.linear_attention import convolution
from twinkle.model.decoder.linear_attention.bounds import Bounds
from twinkle.model.decoder.linear_attention.convolution_kernels import gradient_of_rows, silu_of_convolution

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("lengths", [(5, 1, 70, 2, 1, 3), (1,), (64,), (2, 2, 31)], ids=str)
@pytest.mark.parametrize(("features", "width"), [(24, 4), (130, 3)])
def test_results_and_gradients_are_those_of_the_formula(lengths: tuple[int, ...], features: int, width: int) -> None:
    generator, rows = torch.Generator(DEVICE).manual_seed(0), sum(lengths)
    x, slopes = torch.randn(2, rows, features, generator=generator, device=DEVICE)
    weight = torch.randn(features, width, generator=generator, device=DEVICE)
    bounds = Bounds.from_lengths(lengths, DEVICE)
    exact = x.double().requires_grad_()
    pieces = [
        F.conv1d(piece.t()[None], weight.double()[:, None], padding=width - 1, groups=features)[0, :, : len(piece)].t()
        for piece in exact.split(lengths)
    ]
    (of_rows,) = torch.autograd.grad(F.silu(torch.cat(pieces)), exact, slopes.double())
    out, y = silu_of_convolution(x, weight, bounds.positions_T, keep=True)
    assert y is not None
    found = gradient_of_rows(slopes, y, weight, bounds.positions_T)
    for ours, wanted in ((y, torch.cat(pieces)), (out, F.silu(torch.cat(pieces))), (found, of_rows)):
        assert (ours.double() - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.parametrize("half", [False, True])
def test_the_kernels_are_used_where_they_agree(half: bool) -> None:
    dtype = torch.float32 if not half else torch.bfloat16 if torch.cuda.is_available() else torch.float16
    assert convolution._kernels_agree(DEVICE, dtype)


@pytest.mark.parametrize("trains", [True, False])
def test_columns_of_a_wider_tensor(trains: bool) -> None:
    """Rows lie apart in memory, in the input and in the gradient of the result."""
    generator, bounds = torch.Generator(DEVICE).manual_seed(0), Bounds.from_lengths((4, 9), DEVICE)
    wide, slopes = torch.randn(2, 13, 80, generator=generator, device=DEVICE)
    weight = torch.randn(40, 4, generator=generator, device=DEVICE)
    wide.requires_grad_(trains)
    ours = convolution._KernelConvolution.apply(wide[:, 8:48], weight, bounds.positions_T, trains)
    expected = F.silu(convolution.causal_convolution(wide[:, 8:48], weight, bounds))
    pairs = [(ours, expected)]
    if trains:
        pairs.append(tuple(torch.autograd.grad(each, wide, slopes[:, 8:48])[0] for each in (ours, expected)))
    for found, wanted in pairs:
        assert (found - wanted).norm() < 2e-6 * wanted.norm()
