"""Clipping the gradients of a model's parameters in one process; tests/model/parallel tests several processes."""

import math

import pytest
import torch
from torch import nn

from twinkle.model.parallel import SINGLE
from twinkle.model.transformers import gradients

SIZES = (1_000_003, 70_000, 1, 0)  # the first is so long that torch's own fp32 sum has an error of 2.7e-5


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (*SIZES, 5)]
    for parameter in parameters[:-1]:  # the last has no gradient
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return parameters


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_has_the_digits_of_fp32(dtype: torch.dtype, norm_type: float) -> None:
    parameters = _parameters(dtype)
    before = torch.cat([each.grad for each in parameters if each.grad is not None])
    wanted = float(torch.linalg.vector_norm(before.double(), norm_type))
    # Pieces of 512 numbers are added up in fp32, so each norm has an error of about √512 roundings in random
    # directions.
    tolerance = math.sqrt(512) * torch.finfo(torch.float32).eps / 2
    assert gradients.clip(parameters, wanted / 2, norm_type, SINGLE) == pytest.approx(wanted, rel=tolerance)
    after = torch.cat([each.grad for each in parameters if each.grad is not None])
    # One rounding of each number, one of the factor, and the 1e-6 that torch adds to the norm.
    torch.testing.assert_close(
        after.double(), before.double() / 2, rtol=2 * torch.finfo(dtype).eps + 1e-6 / wanted, atol=0
    )
    assert parameters[-1].grad is None


def test_a_gradient_within_the_limit_stays_as_it_is() -> None:
    parameters = _parameters(torch.float32)
    before = parameters[0].grad.clone()
    gradients.clip(parameters, math.inf, 2.0, SINGLE)
    torch.testing.assert_close(parameters[0].grad, before, rtol=0, atol=0)


def test_no_gradient_has_norm_0() -> None:
    assert gradients.clip([nn.Parameter(torch.zeros(3))], 1.0, 2.0, SINGLE) == 0.0
