"""Dividing arguments among workers and merging their results, without workers."""

import numpy as np
import pytest
import torch

from twinkle import DeviceMesh
from twinkle.errors import InvalidInputError
from twinkle.infra import collect_tensor_dict
from twinkle.infra.collect import check_collect, collect_results
from twinkle.infra.dispatch import check_dispatch, dispatch_arguments, shares

DP2_TP2 = DeviceMesh.from_sizes(dp_size=2, tp_size=2, device_type="cpu")
PP2_DP2 = DeviceMesh.from_sizes(pp_size=2, dp_size=2, device_type="cpu")


def sent(dispatch, mesh, *args, workers=None, of=None, **kwargs):
    of = mesh.world_size if of is None else of
    chosen = range(of) if workers is None else workers
    return [dispatch_arguments(dispatch, share, args, kwargs) for share in shares(mesh, chosen, of)]


def collected(collect, results, mesh=DP2_TP2):
    return collect_results(collect, results, mesh, range(len(results)), len(results))


def test_slice_cuts_lists_only():
    got = sent("slice", DP2_TP2, [1, 2, 3, 4, 5], (6, 7), name={"a": [8]})
    assert [args[0] for args, _ in got] == [[1, 2], [3], [4], [5]]
    assert all(args[1] == (6, 7) and kwargs == {"name": {"a": [8]}} for args, kwargs in got)


def test_slice_dp_gives_ranks_with_the_same_rows_the_same():
    got = sent("slice_dp", DP2_TP2, inputs=[1, 2, 3], extra={"x": torch.arange(4), "y": 5})
    assert [kwargs["inputs"] for _, kwargs in got] == [[1, 2], [1, 2], [3], [3]]
    assert [kwargs["extra"]["x"].tolist() for _, kwargs in got] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert {kwargs["extra"]["y"] for _, kwargs in got} == {5}


def test_slice_dp_with_several_devices_for_a_worker():
    got = sent("slice_dp", DP2_TP2, [1, 2, 3], of=2)
    assert [args[0] for args, _ in got] == [[1, 2], [3]]


def test_slice_dp_on_some_workers_loses_nothing():
    mesh = DeviceMesh.from_sizes(dp_size=4)
    got = sent("slice_dp", mesh, [1, 2, 3], workers=[2, 3])
    assert [args[0] for args, _ in got] == [[1, 2], [3]]


def test_a_batch_of_less_than_a_row_each_is_refused_and_an_empty_one_is_not():
    with pytest.raises(InvalidInputError, match="at least 2 rows"):
        sent("slice_dp", DP2_TP2, [1])
    assert [args[0] for args, _ in sent("slice_dp", DP2_TP2, [])] == [[]] * 4


def test_all_and_functions():
    assert sent("all", DP2_TP2, [1], k=[2]) == [(([1],), {"k": [2]})] * 4
    got = sent(lambda n, i, args, kwargs, device_mesh: ((n, i), {"world": device_mesh.world_size}), DP2_TP2)
    assert got[3] == ((4, 3), {"world": 4})


def test_unknown_names():
    for check, field in ((check_dispatch, "dispatch"), (check_collect, "collect")):
        with pytest.raises(InvalidInputError, match=f"{field}: got 'scatter', allowed: "):
            check("scatter")


def test_none_and_first():
    assert collected("none", [1, 2]) == [1, 2]
    assert collected("none", [[1]]) == [1]
    assert collected("first", [1, 2]) == 1
    assert collected("mean", []) == []


def test_flatten_keeps_the_type():
    assert collected("flatten", [[1, 2], [3]]) == [1, 2, 3]
    assert collected("flatten", [np.array([1]), np.array([2, 3])]).tolist() == [1, 2, 3]
    assert torch.equal(collected("flatten", [torch.tensor([1]), torch.tensor([2])]), torch.tensor([1, 2]))
    with pytest.raises(InvalidInputError, match="result to flatten: got 5"):
        collected("flatten", [5, 6])


def test_mean_and_sum():
    assert collected("mean", [1, 2.0, 6]) == collected("avg", [1, 2, 6]) == 3.0
    assert collected("sum", [1, 2]) == 3
    assert collected("mean", [np.array([1.0, 2.0]), np.array([3.0, 6.0])]).tolist() == [2.0, 4.0]
    assert collected("mean", [torch.tensor(1.0), torch.tensor(2.0)]) == 1.5
    assert collected("mean", [{"loss": 1.0, "lr": "a"}, {"loss": 3.0, "lr": "b", "only": 4}]) == {
        "loss": 2.0,
        "lr": ["a", "b"],
        "only": 4.0,
    }
    with pytest.raises(InvalidInputError, match="result to take the mean of: got 'x'"):
        collected("mean", ["x", "y"])


def test_tuples_are_collected_place_by_place():
    assert collected("mean", [(1, 10), (3, 20)]) == (2.0, 15.0)
    assert collected("flatten", [([1], [2]), ([3], [4])]) == ([1, 3], [2, 4])


def test_results_of_the_last_stage():
    assert collected("last_pp", ["a", "b", "c", "d"], PP2_DP2) == ["c", "d"]
    assert collected("last_pp_first", ["a", "b", "c", "d"], PP2_DP2) == "c"
    assert collected("last_pp_first", ["a", "b"], DeviceMesh.from_sizes(dp_size=2)) == "a"


def test_functions_get_the_mesh():
    assert collected(lambda results, device_mesh: (sum(results), device_mesh.world_size), [1, 2]) == (3, 4)


def test_outputs_of_ranks_become_one():
    outputs = [
        {
            "logps": torch.full((1, 2 + rank), float(rank)),
            "rows": [torch.ones(2), torch.ones(1 + rank)],
            "ids": [rank],
            "loss": torch.tensor(float(rank)),
            "array": np.array([rank]),
            "nested": {"x": torch.tensor([rank])},
            "name": f"rank {rank}",
        }
        for rank in range(4)
    ]
    merged = collect_tensor_dict(outputs, DP2_TP2)  # ranks 0 and 2 represent the two data ranks
    assert merged["logps"].tolist() == [[0, 0, -200, -200], [2, 2, 2, 2]]
    assert merged["rows"].tolist() == [[1, 1, -200], [1, -200, -200], [1, 1, -200], [1, 1, 1]]
    assert merged["ids"] == [0, 2]
    assert merged["loss"] == 1.0
    assert merged["array"].tolist() == [0, 2]
    assert merged["nested"]["x"].tolist() == [0, 2]
    assert merged["name"] == ["rank 0", "rank 2"]


def test_outputs_of_one_or_none():
    assert collect_tensor_dict([], DP2_TP2) == {}
    assert collect_tensor_dict([{"loss": 1.0}], DP2_TP2) == {"loss": 1.0}
