"""Calls through proxies: which workers run, with which arguments, and what is returned."""

from dataclasses import replace

import pytest

import twinkle
from tests.on_ray.ray_components import GROUPS, Rows, Source
from twinkle.dataloader import DataLoader
from twinkle.errors import InvalidInputError
from twinkle.infra import DeviceMesh, current_settings, initialization

pytestmark = pytest.mark.ray


def test_a_proxy_has_the_type_and_the_remote_functions_of_its_class(rows):
    assert isinstance(rows, Rows)
    assert repr(rows) == "<Rows 'rows-0' on 2 workers of group 'work'>"
    assert (rows.remote_group, rows.instance_id, rows.device_mesh.world_size) == ("work", "rows-0", 2)
    with pytest.raises(AttributeError, match=r"Rows.rank is not a remote function.* of group 'work'; .*by_data"):
        rows.rank()


def test_dispatch(rows):
    assert rows.sliced([1, 2, 3], word="x") == ([0, 1], [[1, 2], [3]], ["x", "x"])
    assert rows.by_data({"ids": [1, 2, 3], "n": 4}) == [
        [0, {"ids": [1, 2], "n": 4}, None],
        [1, {"ids": [3], "n": 4}, None],
    ]
    assert rows.dispatched_by_function("part") == [["part for 0 of 2", 2], ["part for 1 of 2", 2]]
    assert rows.first_only([1, 2, 3]) == (0, [1, 2, 3])
    assert rows.peers() == [0, 1]
    with pytest.raises(InvalidInputError, match="Batch too small"):
        rows.by_data([1])


def test_collect(rows):
    assert rows.doubled([1, 2, 3])() == [2, 4, 6]
    assert rows.mean(scale=3.0) == {"loss": 1.5, "name": ["rank 0", "rank 1"]}
    assert rows.total() == 3
    assert rows.collected_by_function() == (11, 2)
    assert rows.data_rank() == (0, 2)


def test_workers_are_told_their_rank_and_our_variables(rows):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "TWINKLE_SEED", "CUDA_VISIBLE_DEVICES"]
    names += ["TWINKLE_CPU_PG_CPUS_PER_PROC", "MASTER_PORT"]
    (first,), (second,) = rows.variables(names)
    assert int(first.pop("MASTER_PORT")) == int(second.pop("MASTER_PORT")) > 0
    assert list(first.values()) == ["0", "2", "0", "0", "7", "", "0.25"]
    assert list(second.values()) == ["1", "2", "0", "0", "7", "", "0.25"]


def test_workers_get_nothing_else_of_the_environment(rows, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "x")
    monkeypatch.setenv("TWINKLE_TEST_VARIABLE", "y")
    other = Rows(remote_group="data")
    (found,) = other.variables(["SECRET_OF_THE_DRIVER", "TWINKLE_TEST_VARIABLE"])
    assert found == {"SECRET_OF_THE_DRIVER": None, "TWINKLE_TEST_VARIABLE": "y"}


def test_a_worker_sees_its_devices_only(rows):
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, device_type="cuda")
    cards = Rows(remote_group="cards", device_mesh=mesh)
    assert cards.variables(["CUDA_VISIBLE_DEVICES", "WORLD_SIZE"]) == [
        [{"CUDA_VISIBLE_DEVICES": "0,1", "WORLD_SIZE": "2"}],
        [{"CUDA_VISIBLE_DEVICES": "2,3", "WORLD_SIZE": "2"}],
    ]
    # two workers, each with the two tensor-parallel ranks of one data rank
    assert cards.by_data([1, 2, 3]) == [[0, [1, 2], None], [1, [3], None]]
    assert cards.data_rank() == (0, 4)
    assert rows.ask_peers(cards) == [0, 1]  # each worker asks the worker of its own rank
    with pytest.raises(InvalidInputError, match="device_mesh: got '3 ranks', allowed: 4, as group 'cards' has"):
        Rows(remote_group="cards", device_mesh=DeviceMesh.from_sizes(dp_size=3))
    drawing = twinkle.get_device_placement()
    assert f"{cards.instance_id}: dp 2 × tp 2" in drawing
    assert "group cards: 2 workers on GPU, 2 devices each, ranks 0–3" in drawing


def test_a_promise_is_resolved_by_the_workers_it_is_given_to(rows, source):
    from ray.exceptions import RaySystemError

    with pytest.raises(RaySystemError, match="the driver has looked"):
        source.sealed()()  # here the driver fetches the value; in the calls below it does not
    opened = source.opened(source.sealed(), offset=10)
    assert rows.doubled(opened)() == [22, 24, 26, 28, 30]
    assert rows.seen_rows()[0][-1] == [11, 12, 13]
    assert rows.seen_rows()[1][-1] == [14, 15]


def test_promises_among_the_items_of_an_argument(rows, source):
    first = source.opened(source.sealed(), offset=0)
    assert rows.by_data({"a": first, "b": [7, 8]}) == [
        [0, {"a": [1, 2, 3], "b": [7]}, None],
        [1, {"a": [4, 5], "b": [8]}, None],
    ]


def test_a_promise_can_be_used_as_its_result(rows):
    promise = rows.doubled([1, 2, 3])
    assert "not collected yet" in repr(promise)
    assert (len(promise), promise[1], list(promise)) == (3, 4, [2, 4, 6])
    assert promise() is promise()


def test_sync_calls_return_results(rows):
    assert rows.remember([5]) == [None, None]


def test_items_of_an_iteration_are_promises(rows, source):
    assert len(source) == 2
    got = [rows.doubled(batch)() for batch in source]
    assert got == [[2, 4, 6], [8, 10]]
    first, second = iter(source), iter(source)  # two iterations at once do not disturb each other
    assert [next(first)(), next(second)(), next(first)()] == [[1, 2, 3], [1, 2, 3], [4, 5]]
    assert next(first, None) is None
    assert next(first, None) is None


def test_a_proxy_in_a_worker_returns_results(rows, source):
    assert source.doubled_elsewhere(rows, [1, 2, 3]) == ("list", [2, 4, 6])


def test_processes_of_a_group_meet_in_torch_distributed(rows):
    assert rows.reduced() == 3.0


def test_a_data_loader_feeds_a_group_without_the_driver(rows, program):
    loader = DataLoader([10, 20, 30, 40], batch_size=3, min_batch_size=1, shuffle=False, remote_group="data")
    assert isinstance(loader, DataLoader)
    assert len(loader) == 2
    batches = []
    for batch in loader:
        assert "not collected yet" in repr(batch)
        batches.append(batch)
        if len(batches) == 1:
            assert rows.doubled(batch)() == [20, 40, 60]
    assert [batch() for batch in batches] == [[10, 20, 30], [40]]
    assert loader.get_state() == {"consumed_train_samples": 4}
    assert next(loader)() == [10, 20, 30]


def test_without_a_group_an_object_is_made_here(program):
    local = Rows(start=3)
    assert (type(local), local.start, local.device_mesh) == (Rows, 3, None)
    assert local.doubled([1]) == [2]


def test_the_program_can_be_initialized_again_as_it_is(program):
    twinkle.initialize("ray", groups=GROUPS, seed=7, name="tests")
    with pytest.raises(InvalidInputError, match="shutdown"):
        twinkle.initialize("ray", groups=GROUPS[:1])
    assert current_settings().name == "tests"


def test_the_mesh_of_initialize(program, monkeypatch):
    settings = replace(current_settings(), mesh=DeviceMesh.from_sizes(fsdp_size=2))
    monkeypatch.setattr(initialization, "_settings", settings)
    staged = Rows(remote_group="work")
    assert staged.device_mesh is settings.mesh
    assert staged.by_data([1, 2]) == [[0, [1], None], [1, [2], None]]
    with pytest.raises(InvalidInputError, match="device_mesh: got '2 ranks', allowed: 1, as group 'data' has"):
        Rows(remote_group="data")


def test_names_are_arguments(source):
    with pytest.raises(InvalidInputError, match="instance_id: got 'the source'"):
        Source([], remote_group="data", instance_id="the source")
