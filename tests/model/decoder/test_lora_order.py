"""LoRA's product is written if all rows of a linear layer have an adapter, and added if only some have one."""

import pytest
import torch
from torch import Tensor

from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.lora import LayerLora, LoraLinear
from twinkle.model.decoder.lora.segments import Segment, SegmentLora
from twinkle.model.decoder.lora.stacks import RowLayout, Target

UP, DOWN = Target("layers.0.up", 64, 96), Target("layers.0.down", 96, 64)
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu])


def segment(start: int, sizes: tuple[int, ...], targets: tuple[Target, ...], device: str = "cpu") -> SegmentLora:
    layout = RowLayout(8, targets)
    weights_GP = torch.randn(len(sizes), layout.size, generator=torch.Generator().manual_seed(start)).to(device)
    bounds = Segment(start, start + sum(sizes), Groups(sizes))
    return SegmentLora(bounds, layout, weights_GP, torch.zeros_like(weights_GP))


def whole_weights(weight_OI: Tensor, lora: SegmentLora) -> Tensor:
    """Return W + B A of each row."""
    groups = [weight_OI] * len(lora.weights_GP)
    if lora.layout.has(UP.name):
        groups = [
            weight_OI + b_OR @ a_RI for a_RI, b_OR in zip(*lora.layout.views(lora.weights_GP, UP.name), strict=True)
        ]
    sizes = lora.segment.groups.sizes
    return torch.cat([group.expand(size, -1, -1) for group, size in zip(groups, sizes, strict=True)])


def test_rows_are_covered_where_all_have_an_adapter() -> None:
    both, one = segment(0, (3, 2), (UP, DOWN)), segment(5, (4,), (UP,))
    layer = LayerLora("layers.0.", [both, one], None)
    assert layer.covers("up", 9)
    assert not layer.covers("up", 10)  # the last row has no adapter
    assert not layer.covers("down", 9)
    assert not layer.covers("other", 9)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("second", [(UP,), (DOWN,)])
def test_the_order_does_not_matter(second: tuple[Target, ...], bias: bool, device: str) -> None:
    """Compare with the formula in fp32, if all rows have an adapter on "up" and if only the first ones do."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    segments = [segment(0, (3, 2), (UP,), device), segment(5, (4,), second, device)]
    base = torch.nn.Linear(UP.in_features, UP.out_features, bias=bias, device=device).requires_grad_(False)
    linear = LoraLinear(base, "up")
    linear.lora = LayerLora("layers.0.", segments, None)
    x_TI = torch.randn(9, UP.in_features, device=device, requires_grad=True)
    dy_TO = torch.randn(9, UP.out_features, device=device)
    whole_TOI = torch.cat([whole_weights(base.weight, each) for each in segments])
    expected_TO = torch.einsum("toi,ti->to", whole_TOI, x_TI.detach()) + (base.bias if bias else 0)
    y_TO = linear(x_TI)
    (dx_TI,) = torch.autograd.grad(y_TO, x_TI, dy_TO)
    torch.testing.assert_close(y_TO, expected_TO, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx_TI, torch.einsum("toi,to->ti", whole_TOI, dy_TO), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(linear(x_TI), y_TO)
