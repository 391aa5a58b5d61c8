"""The remote decorators change nothing in local mode."""

import copy
import inspect
import pickle

import pytest

import twinkle
from twinkle import DeviceGroup, DeviceMesh, remote_class, remote_function
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.infra import initialization
from twinkle.infra.components import forget_components
from twinkle.infra.remote import RemoteSpec, remote_methods


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(initialization, "_settings", initialization.Settings())
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    forget_components()
    yield
    forget_components()


@remote_class()
class Model:
    """A model."""

    def __init__(self, model_id: str, device_mesh: DeviceMesh | None = None, *, lr: float = 0.1) -> None:
        self.model_id = model_id
        self.device_mesh = device_mesh
        self.lr = lr

    @remote_function(dispatch="slice_dp", collect="mean", lazy_collect=False)
    def forward(self, rows: list[int]) -> list[int]:
        return rows

    @remote_function(execute="first")
    def save(self, name: str) -> str:
        return name


class Special(Model):
    def __init__(self, extra: int) -> None:
        super().__init__("special", lr=0.5)
        self.extra = extra

    def forward(self, rows: list[int]) -> list[int]:
        return super().forward(rows)[::-1]


def plain(self, rows):
    return rows


def test_a_method_is_the_function_it_was():
    assert remote_function(dispatch="all")(plain) is plain
    assert Model("m").forward([1, 2]) == [1, 2]


def test_a_method_tells_how_it_is_called():
    method = Model.forward
    assert (method._dispatch, method._execute, method._collect) == ("slice_dp", "all", "mean")
    assert (method._sync, method._lazy_collect) == (False, False)
    assert (Model.save._execute, Model.save._lazy_collect) == ("first", None)


def test_an_override_is_called_like_what_it_overrides():
    @remote_class()
    class Again(Model):
        def forward(self, rows: list[int]) -> list[int]:
            return rows[::-1]

    assert (Again.forward._dispatch, Again.forward._collect) == ("slice_dp", "mean")
    assert Again("m").forward([1, 2]) == [2, 1]


def test_constructors_keep_signature_name_and_text():
    assert list(inspect.signature(Model).parameters) == ["model_id", "device_mesh", "lr"]
    assert list(inspect.signature(Special).parameters) == ["extra"]
    assert (Model.__name__, Model.__doc__) == ("Model", "A model.")
    with pytest.raises(TypeError, match="model_id"):
        Model()
    with pytest.raises(TypeError, match="'unknown'"):
        Model("m", unknown=1)


def test_instances_are_copied_and_pickled_as_ever():
    model = Model("m", lr=0.2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (type(twin), twin.model_id, twin.lr) == (Model, "m", 0.2)


def test_without_initialize_there_is_no_mesh():
    assert Model("m").device_mesh is None
    assert Model("m", remote_group="anything", instance_id="x").device_mesh is None


def test_the_mesh_of_initialize_goes_to_who_was_given_none():
    mesh = DeviceMesh.from_sizes(dp_size=1, tp_size=1)
    twinkle.initialize(global_device_mesh=mesh)
    other = DeviceMesh.from_sizes(dp_size=2)
    assert Model("m").device_mesh is mesh
    assert Model("m", device_mesh=None).device_mesh is mesh
    assert Model("m", device_mesh=other).device_mesh is other
    assert Model("m", other).device_mesh is other
    special = Special(3)
    assert (special.device_mesh, special.lr, special.extra) == (mesh, 0.5, 3)


def test_components_are_drawn(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    twinkle.initialize()
    Model("m", remote_group="anything")
    assert "  Model: dp 2 " in twinkle.get_device_placement()


def test_groups_are_checked_where_they_were_named():
    twinkle.initialize(groups=[DeviceGroup("model", 1, "CPU")])
    assert Model("m", remote_group="model").model_id == "m"
    with pytest.raises(UnknownNameError, match="unknown remote_group 'sampler'; known: model"):
        Model("m", remote_group="sampler")


def test_what_can_be_called_remotely():
    methods = remote_methods(Special)
    assert methods["forward"] == RemoteSpec("slice_dp", "all", "mean", lazy_collect=False)
    assert methods["save"].execute == "first"
    assert set(methods) == {"forward", "save"}


def test_mistakes_show_at_once():
    with pytest.raises(InvalidInputError, match="dispatch: got 'scatter'"):
        remote_function(dispatch="scatter")
    with pytest.raises(InvalidInputError, match="collect: got 'median'"):
        remote_function(collect="median")
    with pytest.raises(InvalidInputError, match="execute: got 'some', allowed: 'first', 'peer' or 'all'"):
        remote_function(execute="some")
    with pytest.raises(InvalidInputError, match="execute"):
        remote_class(execute="one")
