"""Products over groups of rows, compared with the plain formula in float64, one group after another."""

import pytest
import torch
from torch import Tensor

from tests.support.models.reference import relative_error
from twinkle.model.decoder.lora.grouped import Groups, add_grouped_outer, grouped_mm

SIZES = {
    "one group": (37,),
    "equal": (24, 24, 24),
    "ragged": (5, 128, 1, 67),
    "ragged, many": tuple(range(1, 41)),
}
RANKS = (8, 32, 128)
WIDE = 264
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def normal(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(like)


def empty_on(device: str, dtype: torch.dtype) -> Tensor:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    return torch.empty(0, device=device, dtype=dtype)


def expected_mm(rows_TK: Tensor, weights_GKN: Tensor, sizes: tuple[int, ...]) -> Tensor:
    pairs = zip(rows_TK.double().split(sizes), weights_GKN.double(), strict=True)
    return torch.cat([rows @ weights for rows, weights in pairs])


def assert_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert relative_error(ours.double().cpu().numpy(), theirs.double().cpu().numpy()) <= DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_products_equal_the_formula(sizes: str, rank: int, device: str, dtype: torch.dtype) -> None:
    """Uses the strides of real layers: A and B lie in rows of adapters, x A.T in a matrix for the largest rank."""
    like = empty_on(device, dtype)
    groups = Groups(SIZES[sizes])
    count, rows = len(groups.sizes), sum(groups.sizes)
    weights_GP = normal(count, 2 * rank * WIDE + 8, like=like)
    a_GRI = weights_GP[:, : rank * WIDE].view(count, rank, WIDE)
    b_GOR = weights_GP[:, rank * WIDE : 2 * rank * WIDE].view(count, WIDE, rank)
    x_TI = normal(rows, WIDE, like=like, seed=1)
    for weights_GKN in (a_GRI.transpose(1, 2), b_GOR):
        h_TR = torch.full((rows, rank + 16), torch.nan).to(like)
        grouped_mm(h_TR[:, :rank], x_TI, weights_GKN, groups, beta=0)
        assert_close(h_TR[:, :rank], expected_mm(x_TI, weights_GKN, groups.sizes), dtype)
        assert h_TR[:, rank:].isnan().all(), "wrote beyond its columns"
    h = normal(rows, rank + 16, like=like, seed=2)[:, :rank]
    for weights_GKN in (b_GOR.transpose(1, 2), a_GRI):
        y_TO = normal(rows, WIDE, like=like, seed=3)
        expected_TO = y_TO.double() + expected_mm(h, weights_GKN, groups.sizes)
        grouped_mm(y_TO, h, weights_GKN, groups, beta=1)
        assert_close(y_TO, expected_TO, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_outer_products_are_added(sizes: str, rank: int, device: str, dtype: torch.dtype) -> None:
    like = empty_on(device, dtype)
    groups = Groups(SIZES[sizes])
    count, rows = len(groups.sizes), sum(groups.sizes)
    x_TI, h = normal(rows, WIDE, like=like), normal(rows, rank + 16, like=like, seed=1)[:, :rank]
    gradient_GP = normal(count, rank * WIDE + 8, like=like.float(), seed=2)
    for left_TK, right_TN in ((h, x_TI), (x_TI, h)):
        before_GP = gradient_GP.clone()
        shape = (count, left_TK.shape[1], right_TN.shape[1])
        pairs = zip(left_TK.double().split(groups.sizes), right_TN.double().split(groups.sizes), strict=True)
        expected_GKN = before_GP[:, :-8].view(shape) + torch.stack([left.T @ right for left, right in pairs])
        add_grouped_outer(gradient_GP[:, :-8].view(shape), left_TK, right_TN, groups)
        assert_close(gradient_GP[:, :-8].reshape(shape), expected_GKN, dtype)
        assert torch.equal(gradient_GP[:, -8:], before_GP[:, -8:]), "wrote beyond its module"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", ["equal", "ragged", "ragged, many"])
def test_fp32_gradients_of_bf16_factors_are_not_rounded(sizes: str) -> None:
    like = empty_on("cuda", torch.bfloat16)
    groups = Groups(SIZES[sizes])
    left_TK, right_TN = (normal(sum(groups.sizes), 64, like=like, seed=seed) for seed in (0, 1))
    out_GKN = torch.zeros(len(groups.sizes), 64, 64, device="cuda")
    add_grouped_outer(out_GKN, left_TK, right_TN, groups)
    pairs = zip(left_TK.double().split(groups.sizes), right_TN.double().split(groups.sizes), strict=True)
    expected_GKN = torch.stack([left.T @ right for left, right in pairs])
    assert relative_error(out_GKN.cpu().numpy(), expected_GKN.cpu().numpy()) <= 1e-5


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("sizes", ["equal", "ragged"])
def test_rows_that_are_not_finite_touch_no_other_group(sizes: str, device: str) -> None:
    like = empty_on(device, torch.bfloat16)
    groups = Groups(SIZES[sizes])
    count, rows, first = len(groups.sizes), sum(groups.sizes), groups.sizes[0]
    weights_GKN = normal(count, WIDE, 32, like=like)
    outcomes = []
    for value in (0.5, torch.nan):
        x_TI = normal(rows, WIDE, like=like, seed=1)
        x_TI[first : first + groups.sizes[1]] = value  # the whole second group
        h_TR = grouped_mm(x_TI.new_empty(rows, 32), x_TI, weights_GKN, groups, beta=0)
        gradient_GKN = torch.zeros(count, WIDE, 32, device=like.device)
        add_grouped_outer(gradient_GKN, x_TI, h_TR, groups)
        outcomes.append((h_TR, gradient_GKN))
    (fine_TR, fine_GKN), (broken_TR, broken_GKN) = outcomes
    others = torch.ones(rows, dtype=torch.bool)
    others[first : first + groups.sizes[1]] = False
    assert torch.equal(fine_TR[others.to(like.device)], broken_TR[others.to(like.device)])
    kept = [group for group in range(count) if group != 1]
    assert torch.equal(fine_GKN[kept], broken_GKN[kept])
    assert broken_GKN[1].isnan().any()
