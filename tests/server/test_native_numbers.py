"""Rows of numbers in native requests and results: arrays, without a Python loop over tokens."""

import json
import math

import numpy as np
import pytest

from twinkle.errors import InvalidInputError
from twinkle.server.backends.text_codec import max_characters, text_groups
from twinkle.server.types import NativePass
from twinkle.server.verbs.codec import finite, journal_body, read_op, succeeded, verb_op
from twinkle.server.verbs.features import checked_rows, numbers


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1, 2, -100], [1, 2, -100]),
        ([1.0, 2.0], [1, 2]),
        ([True, False], [1, 0]),
        ([1, True, 2.0], [1, 1, 2]),
        ([[1, 2], [3, 4]], [1, 2]),
        ([[[5]]], [5]),
        ([], []),
        ([2**31 - 1, -(2**31)], [2**31 - 1, -(2**31)]),
    ],
)
def test_whole_numbers(given, expected):
    column = numbers(given, "x")
    assert column.dtype == np.int64
    assert column.tolist() == expected


@pytest.mark.parametrize(
    "given",
    [[0.5], [2**31], [-(2**31) - 1], [2**70], [math.nan], [math.inf], ["1"], [1, "1"], [None], [1, [2]], "12", 3, None],
)
def test_no_whole_numbers(given):
    with pytest.raises(InvalidInputError, match="a list of whole numbers"):
        numbers(given, "x")


def test_what_is_refused_is_shown_in_short():
    with pytest.raises(InvalidInputError) as refusal:
        numbers([0.5] * 1_000_000, "x")
    assert len(str(refusal.value)) < 200


def test_rows_in_the_journal():
    """What was accepted comes back from the journal as it was."""
    rows = checked_rows([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "messages": "…"}, {"input_ids": [7]}], 10)
    fields = {"adapter_name": "a", "inputs": rows, "temperature": 0.5}
    op = verb_op("r", 3, "forward_backward", fields, b"sent")
    assert json.loads(journal_body("forward_backward", fields).partition(b"\n")[2]) == {
        "adapter_name": "a",
        "inputs": [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [7]}],
        "temperature": 0.5,
    }
    again = read_op(type("Run", (), {"run_id": "r"}), 3, op.body)
    assert isinstance(op.payload, NativePass)
    assert isinstance(again.payload, NativePass)
    assert op.payload.tokens == again.payload.tokens == 4
    for before, after in zip(op.payload.rows, again.payload.rows, strict=True):
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
    assert again.payload.loss_arguments == op.payload.loss_arguments


def test_results_are_json():
    values = np.array([0.5, -np.inf, np.nan, 2.0], np.float32)
    content = {"result": {"loss": math.nan, "n": 3, "logps": [values, np.ones(2)], "empty": {}, "list": [1, {"a": 2}]}}
    assert json.loads(succeeded(content).body) == {
        "result": {
            "loss": None,
            "n": 3,
            "logps": [[0.5, None, None, 2.0], [1.0, 1.0]],
            "empty": {},
            "list": [1, {"a": 2}],
        }
    }
    assert succeeded(None).body == b"null"
    assert finite(np.array([[1.0, np.nan]])) == [[1.0, None]]


def test_text_is_tokenised_in_groups():
    rows = [{"messages": [{"role": "user", "content": "x" * 400_000}]} for _ in range(5)]
    assert [len(group) for group in text_groups(rows, max_characters(8))] == [2, 2, 1]
    with pytest.raises(InvalidInputError, match=r"inputs\[0\].*characters of text.*at most 1048576"):
        list(text_groups([{"messages": [{"role": "user", "content": "x" * 2**21}]}], max_characters(8)))
