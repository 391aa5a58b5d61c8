"""Products in bf16: fp32 sums, rounded once, whether the CPU has bf16 instructions or not."""

import pytest
import torch

from twinkle.model.decoder import products


@pytest.fixture(params=[False, True], ids=["instructions", "none"], autouse=True)
def slow(request, monkeypatch):
    """Whether the CPU counts as one without bf16 instructions."""
    monkeypatch.setattr(products, "bf16_is_slow", lambda device_type: request.param)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def assert_rounded_once(result: torch.Tensor, exact: torch.Tensor) -> None:
    """One rounding to bf16 errs by at most eps/2 of the number, and the fp32 sum by far less."""
    assert result.dtype == torch.bfloat16
    bound = exact.abs() * torch.finfo(torch.bfloat16).eps * 0.51 + 1e-5
    assert ((result.double() - exact).abs() <= bound).all()


def test_linear():
    x, weight, bias = random(5, 48), random(7, 48), random(7)
    exact = x.double() @ weight.double().t()
    assert_rounded_once(products.linear(x, weight), exact)
    # torch may round the product before it adds the bias, with or without instructions: one more rounding.
    result = products.linear(x, weight, bias)
    error = (result.double() - exact - bias.double()).abs()
    assert (error <= torch.finfo(torch.bfloat16).eps * (exact.abs() + bias.abs() + 1e-3)).all()


def test_linear_has_the_gradient_of_its_input():
    x, weight = random(5, 48).requires_grad_(), random(7, 48)
    dy = random(5, 7)
    products.linear(x, weight).backward(dy)
    assert_rounded_once(x.grad, dy.double() @ weight.double())


def test_linear_keeps_no_wider_copy_of_its_weight():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.dtype) or saved, lambda saved: saved):
        products.linear(random(5, 48).requires_grad_(), random(7, 48))
    assert set(kept) == {torch.bfloat16}


def test_mm():
    left, right, out = random(5, 48), random(48, 6), torch.empty(5, 6, dtype=torch.bfloat16)
    exact = left.double() @ right.double()
    assert_rounded_once(products.mm(left, right), exact)
    assert products.mm(left, right, out=out) is out
    assert_rounded_once(out, exact)


@pytest.mark.parametrize("shape", [(), (3,)], ids=["matrix", "batch"])
def test_add_product(shape):
    left, right, out = random(*shape, 5, 48), random(*shape, 48, 6), random(*shape, 5, 6)
    exact, before = left.double() @ right.double(), out.double()
    assert products.add_product(out, left, right) is out
    error = (out.double() - before - exact).abs()  # of the sum's rounding, and perhaps of the product's
    assert (error <= torch.finfo(torch.bfloat16).eps * (exact.abs() + before.abs() + 1e-3)).all()
    unread = torch.full_like(out, torch.nan)
    products.add_product(unread, left, right, beta=0)
    assert_rounded_once(unread, exact)


def test_fp32_is_not_touched():
    left, right = random(5, 48).float(), random(48, 6).float()
    assert torch.equal(products.mm(left, right), left @ right)
