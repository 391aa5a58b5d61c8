"""An output head whose vocabulary is divided over processes gives the numbers of one process."""

import itertools

import pytest
import torch

from tests.model.parallel.head_programs import HeadCase, HeadNumbers, run_head, run_heads
from tests.model.parallel.process_pool import ProcessPool
from tests.support.models.reference import TOLERANCE, assert_numbers_close, relative_error

# Two processes divide 96 and pad 97 by one; four divide 96 and pad 97 by three.
CASES = [
    HeadCase(vocabulary, width, shaped=shaped, statistics=statistics, tempered=tempered, logits=logits)
    for vocabulary, width, shaped in [(96, 1, False), (97, 3, True)]
    for statistics, tempered, logits in itertools.product([False, True], repeat=3)
]
CASES += [HeadCase(97, lora=False, chunk_rows=100), HeadCase(97, lora=False, shaped=True, chunk_rows=1)]
TINY = HeadCase(5, 2, statistics=True, logits=True, shaped=True)  # of four processes one has padding only


def assert_same(ours: HeadNumbers, theirs: HeadNumbers) -> None:
    for name in ("scored", "values", "logits"):
        assert_numbers_close(getattr(ours, name), getattr(theirs, name))
    lefts, rights = [ours.dhidden, *ours.da, *ours.db], [theirs.dhidden, *theirs.da, *theirs.db]
    for left, right in zip(lefts, rights, strict=True):
        assert relative_error(left.numpy(), right.numpy()) <= TOLERANCE
    assert not any(each.any() for each in ours.padding)


def test_two_processes_compute_as_one(two: ProcessPool) -> None:
    results = two.run(run_heads, CASES)
    for number, case in enumerate(CASES):
        assert_same(results[0][number], run_head(case))
        for name in ("scored", "values", "dhidden", "logits"):  # all ranks compute losses from the same bits
            assert torch.equal(getattr(results[0][number], name), getattr(results[1][number], name))


def test_four_processes_compute_as_one(four: ProcessPool) -> None:
    cases = [CASES[0], CASES[-3], CASES[-2], CASES[-1], TINY]
    for case, ours in zip(cases, four.run(run_heads, cases)[0], strict=True):
        assert_same(ours, run_head(case))


def test_padding_that_counts_as_tokens_is_noticed(two: ProcessPool) -> None:
    wrong = HeadCase(97, padded_as_tokens=True)
    with pytest.raises(AssertionError, match="largest difference"):
        assert_same(two.run(run_heads, [wrong])[0][0], run_head(wrong))


def test_a_row_that_is_not_finite_touches_no_other(two: ProcessPool) -> None:
    fine, broken = HeadCase(97, statistics=True), HeadCase(97, statistics=True, nan_row=8)
    others = torch.arange(23) != 8
    for results in two.run(run_heads, [fine, broken]):
        assert results[1].values[8, 0].isnan()
        for name in ("scored", "values", "dhidden"):
            assert torch.equal(getattr(results[0], name)[others], getattr(results[1], name)[others])
