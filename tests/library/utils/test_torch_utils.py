"""Helpers for tensors, with values worked out by hand."""

import math
from collections import OrderedDict, namedtuple

import pytest
import torch

from twinkle.errors import InvalidInputError
from twinkle.utils import (
    clone_state_dict_to_cpu,
    pad_and_stack_tensors,
    pad_sequence_to_length,
    selective_log_softmax,
    to_device,
)

Pair = namedtuple("Pair", "first second")


def test_tensors_inside_containers_are_moved():
    data = {"a": [torch.zeros(2), (torch.ones(1), "text")], "b": Pair(torch.ones(1), 3), "c": OrderedDict(d=None)}
    moved = to_device(data, "meta")
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == moved["b"].first.device.type == "meta"
    assert (moved["a"][1][1], moved["b"].second, type(moved["c"])) == ("text", 3, OrderedDict)
    assert data["a"][0].device.type == "cpu"


def test_a_copy_shares_nothing():
    weights = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    copy = clone_state_dict_to_cpu({"w": weights, "step": 3})
    with torch.no_grad():
        weights += 1
    assert copy["w"].tolist() == [1.0, 2.0]
    assert not copy["w"].requires_grad
    assert copy["step"] == 3


def test_sequences_are_padded():
    row = torch.tensor([[1, 2], [3, 4]])
    assert pad_sequence_to_length(row, 3).tolist() == [[1, 2, 0], [3, 4, 0]]
    left = pad_sequence_to_length(row, 4, pad_value=-100, left_pad=True)
    assert left.tolist() == [[-100, -100, 1, 2], [-100, -100, 3, 4]]
    assert pad_sequence_to_length(row, 1) is row


def test_tensors_of_different_shapes_are_joined():
    one, two = torch.tensor([1, 2, 3]), torch.tensor([[4], [5]])
    # the first becomes (1, 3) and is padded to (2, 3), as the second
    joined = [[1, 2, 3], [-200, -200, -200], [4, -200, -200], [5, -200, -200]]
    assert pad_and_stack_tensors([one, two]).tolist() == joined
    assert pad_and_stack_tensors([one, two], pad_value=0, concat=False).tolist() == [
        [[1, 2, 3], [0, 0, 0]],
        [[4, 0, 0], [5, 0, 0]],
    ]
    assert pad_and_stack_tensors([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    assert pad_and_stack_tensors([one]) is one
    with pytest.raises(InvalidInputError, match="tensors: got"):
        pad_and_stack_tensors([])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_log_probabilities_of_chosen_entries(dtype, tolerance):
    # softmax of [ln 1, ln 3] is [1/4, 3/4], that of equal logits [1/2, 1/2]
    logits = torch.tensor([[[0.0, math.log(3)], [7.0, 7.0]]], dtype=dtype)
    index = torch.tensor([[1, 0]])
    expected = torch.tensor([[math.log(3 / 4), math.log(1 / 2)]], dtype=dtype)
    torch.testing.assert_close(selective_log_softmax(logits, index), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(selective_log_softmax(logits[0], index[0]), expected[0], atol=tolerance, rtol=0)
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    of_quarters = -(math.log(1 / 4) / 4 + 3 * math.log(3 / 4) / 4)
    torch.testing.assert_close(logps, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(entropy, torch.tensor([[of_quarters, math.log(2)]], dtype=dtype), atol=tolerance, rtol=0)
    with pytest.raises(InvalidInputError, match="index: got"):
        selective_log_softmax(logits, index[0])


def test_log_probabilities_have_gradients():
    logits = torch.tensor([0.0, math.log(3)], requires_grad=True)
    selective_log_softmax(logits[None], torch.tensor([1])).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([-0.25, 0.25]))  # 1 − p for the chosen one, −p for others
