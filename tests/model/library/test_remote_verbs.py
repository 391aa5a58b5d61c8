"""Which rows each worker gets, and how the outputs of workers are merged. Tests with workers are in tests/on_ray."""

import inspect

import numpy as np
import pytest
import torch

from twinkle.infra import DeviceMesh
from twinkle.infra.remote import remote_methods
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.library.remote_verbs import first_keeps, joined_outputs, own_rows

TWO = DeviceMesh.from_sizes(dp_size=2, device_type="cpu")
ROWS = [{"input_ids": [number]} for number in range(3)]


def parts(workers: int, mesh: DeviceMesh, **kwargs) -> list[dict]:
    shares = [own_rows(workers, i, (), kwargs, device_mesh=mesh) for i in range(workers)]
    assert all(args == () for args, _ in shares)
    return [share for _, share in shares]


def test_rows_and_what_belongs_to_them():
    reference = {"logps": torch.arange(6).reshape(3, 2), "loss": 1.0}
    shares = parts(2, TWO, inputs=ROWS, advantages=[1.0, 2.0, 3.0], ref_outputs=reference, betas=[1, 2], scale=0.5)
    assert [share["inputs"] for share in shares] == [ROWS[:2], ROWS[2:]]
    assert [share["advantages"] for share in shares] == [[1.0, 2.0], [3.0]]
    assert [share["ref_outputs"]["logps"].tolist() for share in shares] == [[[0, 1], [2, 3]], [[4, 5]]]
    for share in shares:  # none of these has one entry per row
        assert (share["betas"], share["scale"], share["ref_outputs"]["loss"]) == ([1, 2], 0.5, 1.0)
    arrays = parts(2, TWO, inputs=ROWS, old_logps=np.arange(3.0), shift=np.float64(2))
    assert [share["old_logps"].tolist() for share in arrays] == [[0.0, 1.0], [2.0]]
    assert arrays[0]["shift"] == 2


def test_fewer_rows_than_workers():
    assert [share["inputs"] for share in parts(2, TWO, inputs=ROWS[0])] == [[ROWS[0]], []]
    shares = parts(2, TWO, inputs=ROWS[:1], advantages=[1.0])
    assert [share["advantages"] for share in shares] == [[1.0], []]
    assert [share["inputs"] for share in parts(2, TWO, inputs=[])] == [[], []]


def test_rows_go_by_the_mesh():
    mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2, device_type="cpu")  # rank 1 is dp 1, fsdp 0
    shares = [share["inputs"] for share in parts(4, mesh, inputs=[0, 1, 2, 3])]
    assert shares == [[0], [2], [1], [3]]


def test_what_is_no_list_is_left_to_the_verb():
    assert parts(2, TWO, inputs=5) == [{"inputs": 5}] * 2
    assert parts(2, TWO, adapter_name="a") == [{"adapter_name": "a"}] * 2


def output(rows: int, width: int, loss: float, tokens: float) -> dict:
    return {"logps": torch.full((rows, width), -1.0), "loss": loss, "num_tokens": tokens}


def test_sums_are_added_up():
    merged = joined_outputs([output(2, 3, 6.0, 4.0), output(1, 5, 1.5, 2.0)], device_mesh=TWO)
    assert (merged["loss"], merged["num_tokens"]) == (7.5, 6.0)
    assert merged["logps"].tolist() == [[-1, -1, -1, -200, -200]] * 2 + [[-1.0] * 5]


@pytest.mark.parametrize(("rows", "expected"), [(1, 2.0), (0, 3.0)])
def test_means_are_averaged_over_those_that_have_rows(rows, expected):
    merged = joined_outputs([output(2, 3, 3.0, 0.0), output(rows, 3 if rows else 0, 1.0, 0.0)], device_mesh=TWO)
    assert (merged["loss"], merged["num_tokens"], len(merged["logps"])) == (expected, 0, 2 + rows)


def test_one_worker_and_passes_without_a_loss():
    assert joined_outputs([output(2, 3, 6.0, 4.0)], device_mesh=TWO)["loss"] == 6.0
    merged = joined_outputs([{"logps": torch.zeros(1, 2)}, {"logps": torch.zeros(0, 0)}], device_mesh=TWO)
    assert merged.keys() == {"logps"}
    assert merged["logps"].shape == (1, 2)


@pytest.mark.parametrize("model", [MultiLoraTransformersModel, TransformersModel])
def test_every_verb_can_be_called_on_workers(model):
    public = {name for name, _ in inspect.getmembers(model, inspect.isfunction) if not name.startswith("_")}
    # only for callers in the same process
    here = {"prepare_backward", "prepare_forward", "prepare_forward_backward", "offer_base_weights"}
    assert public - here == set(remote_methods(model))
    others = dict.fromkeys(("forward", "forward_only", "forward_backward"), own_rows)
    others |= {"init_checkpoint_process_group": "slice", "send_weights": first_keeps}  # workers differ
    for name, spec in remote_methods(model).items():
        assert spec.dispatch == others.get(name, "all")  # the default would split lists of options


def test_rows_of_a_sequence_group_count_once() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=4, ulysses_size=2, device_type="cpu")
    inputs = [
        own_rows(4, worker, (), {"inputs": [{"a": 0}, {"a": 1}, {"a": 2}]}, device_mesh=mesh) for worker in range(4)
    ]
    assert [[row["a"] for row in kwargs["inputs"]] for _, kwargs in inputs] == [[0, 1], [0, 1], [2], [2]]
    one, other = output(2, 3, 6.0, 4.0), output(1, 5, 1.5, 2.0)
    merged = joined_outputs([one, one, other, other], device_mesh=mesh)
    assert (merged["loss"], merged["num_tokens"], len(merged["logps"])) == (7.5, 6.0, 3)
