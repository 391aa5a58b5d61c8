"""One kernel for all stacks of a batch, compared with the formula in float64, segment after segment."""

import pytest
import torch
from torch import Tensor

from tests.support.models.reference import relative_error
from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.segments import Segment, SegmentLora, add_lora, add_lora_gradient
from twinkle.model.decoder.lora.stacks import RowLayout, Target
from twinkle.model.decoder.lora.table import LoraTable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

TARGETS = (Target("narrow", 192, 320), Target("wide", 320, 192))
STACKS = (
    (8, TARGETS, (5, 64, 130)),
    (16, TARGETS[:1], (1,)),  # without an adapter on "wide"
    (128, TARGETS, (70, 33)),
    (32, TARGETS, tuple(range(1, 20))),
)
WIDTH = 128
DEVICE, DTYPE = "cuda", torch.bfloat16


def make_segments() -> list[SegmentLora]:
    generator = torch.Generator().manual_seed(0)
    segments, row = [], 0
    for rank, targets, sizes in STACKS:
        layout = RowLayout(rank, targets)
        block = torch.randn(len(sizes) + 2, layout.size, generator=generator).to(DEVICE, DTYPE) / rank**0.5
        gradient_GP = torch.randn(len(sizes), layout.size, generator=generator).to(DEVICE)
        segment = Segment(row, row + sum(sizes), Groups(sizes))
        # the slots lie in the middle of a block
        segments.append(SegmentLora(segment, layout, block[1:-1], gradient_GP))
        row = segment.stop
    return segments


def in_float64(segments: list[SegmentLora]) -> list[SegmentLora]:
    return [
        SegmentLora(each.segment, each.layout, each.weights_GP.double().cpu(), each.gradient_GP.double().cpu())
        for each in segments
    ]


def rows(features: int, seed: int) -> Tensor:
    count = sum(sum(sizes) for _, _, sizes in STACKS)
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def assert_close(ours: Tensor, exact: Tensor, bound: float = 5e-3) -> None:
    assert relative_error(ours.double().cpu().numpy(), exact.double().cpu().numpy()) <= bound


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_one_launch_equals_the_formula(name: str) -> None:
    segments = make_segments()
    exact = in_float64(segments)
    bound = [each.bound(name) for each in exact if each.layout.has(name)]
    target = next(target for target in TARGETS if target.name == name)
    x_TI, y_TO = rows(target.in_features, 1), rows(target.out_features, 2)
    exact_x, exact_y, exact_h = x_TI.double().cpu(), y_TO.double().cpu(), torch.zeros(len(x_TI), WIDTH).double()
    for lora in bound:
        add_lora(lora, exact_x, exact_h, exact_y)
    table = LoraTable.for_segments(segments, [target.name for target in TARGETS])
    h_TR = torch.full((len(x_TI), WIDTH), torch.nan, device=DEVICE, dtype=DTYPE)
    table.add(name, x_TI, h_TR, y_TO)
    assert_close(y_TO, exact_y)
    for lora in bound:
        rank = lora.a_GRI.shape[1]
        assert_close(lora.segment.select_rows(h_TR)[:, :rank], lora.segment.select_rows(exact_h)[:, :rank])
        assert lora.segment.select_rows(h_TR)[:, rank:].isnan().all(), "wrote beyond its rank"

    dy_TO, dx_TI = rows(target.out_features, 3), rows(target.in_features, 4)
    exact_dx = dx_TI.double().cpu()
    for lora in bound:
        add_lora_gradient(lora, dy_TO.double().cpu(), exact_x, h_TR.double().cpu(), exact_dx)
    table.add_gradient(name, dy_TO, x_TI, h_TR, dx_TI)
    assert_close(dx_TI, exact_dx)
    # compares whole rows: gradients of the other layer must not change
    for ours, theirs in zip(segments, exact, strict=True):
        assert_close(ours.gradient_GP, theirs.gradient_GP)


def test_products_are_written_where_nothing_was() -> None:
    """All stacks have an adapter on "narrow", so the earlier content of y and dx must not matter."""
    segments = make_segments()
    table = LoraTable.for_segments(segments, ["narrow"])
    x_TI, dy_TO = rows(192, 1), rows(320, 2)
    outcomes = []
    for beta, value in ((1, 0.0), (0, torch.nan)):
        y_TO, dx_TI = torch.full_like(dy_TO, value), torch.full_like(x_TI, value)
        h_TR = torch.zeros(len(x_TI), WIDTH, device=DEVICE, dtype=DTYPE)
        table.add("narrow", x_TI, h_TR, y_TO, beta=beta)
        table.add_gradient("narrow", dy_TO, x_TI, h_TR, dx_TI, beta=beta)
        outcomes.append((y_TO, dx_TI))
    for added, written in zip(*outcomes, strict=True):
        assert torch.equal(added, written)


def test_rows_that_are_not_finite_touch_no_other_group() -> None:
    outcomes = []
    for value in (0.5, torch.nan):
        segments = make_segments()
        x_TI, y_TO, h_TR = rows(192, 1), rows(320, 2), torch.zeros(len(rows(1, 1)), WIDTH, device=DEVICE, dtype=DTYPE)
        x_TI[5:69] = value  # all rows of the second group in the first stack
        table = LoraTable.for_segments(segments, ["narrow"])
        table.add("narrow", x_TI, h_TR, y_TO)
        dx_TI = torch.zeros_like(x_TI)
        table.add_gradient("narrow", y_TO, x_TI, h_TR, dx_TI)
        outcomes.append((y_TO, dx_TI, [row for each in segments for row in each.gradient_GP]))
    (y_TO, dx_TI, gradients), (broken_y, broken_dx, broken_gradients) = outcomes
    others = torch.ones(len(y_TO), dtype=torch.bool, device=DEVICE)
    others[5:69] = False
    assert torch.equal(y_TO[others], broken_y[others])
    assert torch.equal(dx_TI[others], broken_dx[others])
    for group, (ours, broken) in enumerate(zip(gradients, broken_gradients, strict=True)):
        assert torch.equal(ours, broken) == (group != 1)
