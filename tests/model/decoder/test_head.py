"""The chunked head, compared with full logits and autograd: same values and gradients for any chunk size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.models.reference import TOLERANCE, assert_numbers_close, relative_error
from twinkle.model.decoder.head import ChunkedHead, HeadSpec
from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.segments import BoundLora, Segment

pytestmark = pytest.mark.matrix

ROWS = 43
SIZES = {"toy": (64, 97), "wide": (512, 1000)}  # (hidden, vocabulary)
CHUNKS = [1, 7, 16, ROWS, 1000]

# Rows of each adapter in each segment. Rows 0–4, 20–22 and 40–42 have no head LoRA; chunk borders cut through groups.
SEGMENTS = {
    "none": [],
    "one group": [(0, (ROWS,))],
    "several": [(5, (1, 9, 5)), (23, (4, 13))],
    "equal": [(3, (10, 10))],
}
SPECS = ["plain", "bias", "scale", "softcap", "all of them"]


@dataclass(frozen=True)
class Case:
    spec: HeadSpec
    hidden_TH: Tensor
    targets_TK: Tensor
    weights_TK: Tensor
    lora: tuple[BoundLora, ...]


def make_case(size: str, spec: str, segments: str, width: int, seed: int = 0) -> Case:
    hidden, vocab = SIZES[size]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    everything = spec == "all of them"
    head = HeadSpec(
        weight_VH=normal(vocab, hidden) * 2 / hidden**0.5,
        bias_V=normal(vocab) if everything or spec == "bias" else None,
        scale=0.7 if everything or spec == "scale" else 1.0,
        softcap=3.0 if everything or spec == "softcap" else None,
    )
    lora = tuple(
        BoundLora(
            Segment(start, start + sum(sizes), Groups(sizes)),
            normal(len(sizes), 8 * (1 + number), hidden) / hidden**0.5,
            normal(len(sizes), vocab, 8 * (1 + number)) * 0.3,
        )
        for number, (start, sizes) in enumerate(SEGMENTS[segments])
    )
    targets = torch.randint(0, vocab, (ROWS, width), generator=generator)
    return Case(head, normal(ROWS, hidden), targets, normal(ROWS, width), lora)


def full_logits(case: Case, hidden_TH: Tensor, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the full logits by the formula, one adapter after another."""
    logits_TV = hidden_TH @ case.spec.weight_VH.T
    if case.spec.bias_V is not None:
        logits_TV = logits_TV + case.spec.bias_V
    for bound, (a_GRI, b_GOR) in zip(case.lora, factors, strict=True):
        row = bound.segment.start
        for size, a_RI, b_OR in zip(bound.segment.groups.sizes, a_GRI, b_GOR, strict=True):
            delta = torch.zeros_like(logits_TV)
            delta[row : row + size] = hidden_TH[row : row + size] @ a_RI.T @ b_OR.T
            logits_TV, row = logits_TV + delta, row + size
    logits_TV = logits_TV * case.spec.scale
    if case.spec.softcap is not None:
        logits_TV = case.spec.softcap * torch.tanh(logits_TV / case.spec.softcap)
    return logits_TV


def objective(case: Case, logprobs: Tensor) -> Tensor:
    """Any function for which the derivative of a row depends only on that row."""
    return (case.weights_TK.to(logprobs.dtype) * (logprobs + logprobs.exp())).sum()


def coefficients(case: Case, start: int, stop: int, logprobs_CK: Tensor) -> Tensor:
    return case.weights_TK[start:stop] * (1 + logprobs_CK.exp())


def expected(case: Case) -> tuple[Tensor, list[Tensor]]:
    """Return log-probabilities, and the gradients of hidden states and of each segment's A and B, by autograd."""
    hidden_TH = case.hidden_TH.clone().requires_grad_()
    factors = [(bound.a_GRI.clone().requires_grad_(), bound.b_GOR.clone().requires_grad_()) for bound in case.lora]
    logprobs_TK = full_logits(case, hidden_TH, factors).log_softmax(-1).gather(1, case.targets_TK)
    leaves = [hidden_TH, *(factor for pair in factors for factor in pair)]
    return logprobs_TK.detach(), list(torch.autograd.grad(objective(case, logprobs_TK), leaves))


def computed(case: Case, chunk_rows: int) -> tuple[Tensor, list[Tensor]]:
    lora = [
        replace(bound, da_GRI=torch.zeros_like(bound.a_GRI), db_GOR=torch.zeros_like(bound.b_GOR))
        for bound in case.lora
    ]
    head = ChunkedHead(case.spec, chunk_rows)
    logprobs_TK, gradient_TH = head.logprobs_and_gradient(
        case.hidden_TH, case.targets_TK, lambda *args: coefficients(case, *args), lora
    )
    return logprobs_TK, [gradient_TH, *(gradient for part in lora for gradient in (part.da_GRI, part.db_GOR))]


def assert_equal_to_full_logits(case: Case, chunk_rows: int) -> None:
    logprobs_TK, gradients = computed(case, chunk_rows)
    expected_TK, expected_gradients = expected(case)
    assert_numbers_close(logprobs_TK, expected_TK)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert relative_error(ours.numpy(), theirs.numpy()) <= TOLERANCE


@pytest.mark.parametrize("chunk_rows", CHUNKS)
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("size", SIZES)
def test_any_chunk_and_any_lora_equals_full_logits(size: str, segments: str, chunk_rows: int) -> None:
    assert_equal_to_full_logits(make_case(size, "plain", segments, width=1), chunk_rows)


@pytest.mark.parametrize("chunk_rows", [7, ROWS])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("width", [1, 4])
def test_bias_scale_softcap_and_several_targets(width: int, spec: str, chunk_rows: int) -> None:
    for size in SIZES:
        for segments in ("none", "several"):
            assert_equal_to_full_logits(make_case(size, spec, segments, width), chunk_rows)


def test_a_target_named_twice_counts_twice() -> None:
    case = make_case("toy", "plain", "several", width=3)
    case.targets_TK[:, 2] = case.targets_TK[:, 0]
    assert_equal_to_full_logits(case, 16)


@pytest.mark.parametrize("chunk_rows", CHUNKS)
@pytest.mark.parametrize("spec", ["plain", "all of them"])
def test_scoring_gives_the_same_log_probabilities_and_leaves_its_inputs_alone(spec: str, chunk_rows: int) -> None:
    case = make_case("toy", spec, "several", width=2)
    before = case.hidden_TH.clone(), case.spec.weight_VH.clone()
    scored_TK = ChunkedHead(case.spec, chunk_rows).logprobs(case.hidden_TH, case.targets_TK, case.lora)
    assert scored_TK.dtype == torch.float32
    assert_numbers_close(scored_TK, expected(case)[0])
    computed(case, chunk_rows)
    assert torch.equal(case.hidden_TH, before[0])
    assert torch.equal(case.spec.weight_VH, before[1])


def test_gradients_are_added_to_what_is_there() -> None:
    case = make_case("toy", "plain", "one group", width=1)
    (bound,) = case.lora
    part = replace(bound, da_GRI=torch.ones_like(bound.a_GRI), db_GOR=torch.full_like(bound.b_GOR, 2.0))
    ChunkedHead(case.spec, 7).logprobs_and_gradient(
        case.hidden_TH, case.targets_TK, lambda *args: coefficients(case, *args), [part]
    )
    _, (_, da_GRI, db_GOR) = computed(case, 7)
    np.testing.assert_allclose(part.da_GRI, da_GRI + 1, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(part.db_GOR, db_GOR + 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [5, ROWS])
def test_a_row_that_is_not_finite_touches_no_other(chunk_rows: int) -> None:
    """Other rows and other adapters get the same bits as with finite numbers in that row."""
    outcomes = []
    for value in (0.5, float("nan"), float("inf")):
        case = make_case("toy", "plain", "several", width=2)
        case.hidden_TH[8] = value  # a row of the second adapter in the first segment
        outcomes.append(computed(case, chunk_rows))
    logprobs_TK, (gradient_TH, *factors) = outcomes[0]
    others = torch.arange(ROWS) != 8
    for broken_TK, (broken_TH, *broken_factors) in outcomes[1:]:
        assert not broken_TK[8].isfinite().any()
        assert torch.equal(broken_TK[others], logprobs_TK[others])
        assert torch.equal(broken_TH[others], gradient_TH[others])
        for broken, fine in zip(broken_factors, factors, strict=True):
            kept = [group for group in range(len(fine)) if not (group == 1 and len(fine) == 3)]
            assert torch.equal(broken[kept], fine[kept])
            if len(fine) == 3:
                assert not broken[1].isfinite().all()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_large_logits_stay_finite(softcap: float | None) -> None:
    """exp(500) overflows, but the log-sum-exp must not."""
    spec = HeadSpec(torch.eye(8) * 500, softcap=softcap)
    targets = torch.arange(8)[:, None]
    logprobs, gradient = ChunkedHead(spec, 3).logprobs_and_gradient(
        torch.eye(8), targets.flip(0), lambda start, stop, lp: torch.ones_like(lp)
    )
    assert logprobs.isfinite().all()
    assert gradient.isfinite().all()
    if softcap is None:
        assert_numbers_close(logprobs, torch.full((8, 1), -500.0))
