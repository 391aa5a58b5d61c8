"""Replacements of layers and functions, by class, by dotted name, for one kind of device, and from a hub."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from tests.support.models.plain_training import MODEL, plain_model
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.infra import Platform
from twinkle.kernel import HubRef, hub, kernelize, npu_builtin
from twinkle.model import TransformersModel

IDS = torch.tensor([[3, 5, 7, 9]])


class OtherMLP(nn.Module):
    """Computes something else with the weights of Llama's layer, so that a replacement shows."""

    def forward(self, x):
        return 2 * self.down_proj(self.up_proj(x))


class OwnMLP(modeling_llama.LlamaMLP):
    """A subclass, which is not replaced: only layers of exactly the class are."""


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(Platform, "device_prefix", staticmethod(lambda platform=None: "cpu"))


@torch.no_grad()
def test_layers_get_another_class(device):
    model = plain_model()
    first, second = (layer.mlp for layer in model.model.layers[:2])
    second.__class__ = OwnMLP
    x = torch.randn(1, 2, model.config.hidden_size)
    weights = first.down_proj.weight
    assert kernelize(model, {modeling_llama.LlamaMLP: OtherMLP}) is model
    assert type(first) is OtherMLP
    assert type(second) is OwnMLP
    assert first.down_proj.weight is weights
    assert torch.equal(first(x), 2 * first.down_proj(first.up_proj(x)))


def test_functions_and_methods_are_replaced(monkeypatch, device):
    package, module = ModuleType("replaced_package"), ModuleType("replaced_package.inner")
    module.function = lambda: "old"
    module.Owner = type("Owner", (), {"method": lambda self: "old"})
    monkeypatch.setitem(sys.modules, "replaced_package", package)
    monkeypatch.setitem(sys.modules, "replaced_package.inner", module)
    kernelize(
        nn.Module(),
        {
            "replaced_package.inner.function": lambda: "new",
            "replaced_package.inner.Owner.method": {"cpu": lambda self: "for CPUs", "cuda": lambda self: "for GPUs"},
        },
    )
    assert module.function() == "new"
    assert module.Owner().method() == "for CPUs"


@torch.no_grad()
def test_other_devices_and_empty_mappings_change_nothing(device):
    model = TransformersModel(model_id=MODEL, device="cpu")
    before = [type(module) for module in model.model.modules()]
    for mapping in (None, {}, npu_builtin(model), {modeling_llama.LlamaMLP: {"npu": OtherMLP}}):
        assert kernelize(model, mapping) is model
    assert [type(module) for module in model.model.modules()] == before
    kernelize(model, {modeling_llama.LlamaMLP: OtherMLP})  # of a model of the library, its torch module is changed
    assert OtherMLP in {type(module) for module in model.model.modules()}


def test_npus_are_refused(monkeypatch):
    monkeypatch.setattr(Platform, "device_prefix", staticmethod(lambda platform=None: "npu"))
    with pytest.raises(UnsupportedError, match="there are no kernels for NPUs"):
        npu_builtin()


def test_a_mistake_changes_nothing(device):
    model = nn.Sequential(nn.ReLU())
    for mapping, error, text in (
        ({3: OtherMLP}, TypeError, "Unsupported mapping key 3"),
        ({nn.Linear(1, 1): OtherMLP}, TypeError, "Unsupported mapping key Linear"),
        ({"function": print}, InvalidInputError, "a dotted name"),
        ({"no_such_package.function": print}, ImportError, "there is no module 'no_such_package'"),
    ):
        with pytest.raises(error, match=text):
            kernelize(model, {nn.ReLU: nn.GELU, **mapping})
        assert type(model[0]) is nn.ReLU
    with pytest.raises(InvalidInputError, match="a class of torch modules"):
        kernelize(model, {nn.ReLU: torch.relu})
    with pytest.raises(InvalidInputError, match="model: got 'model'"):
        kernelize("model", {})


def test_references_to_a_hub():
    assert hub("org/kernels:Layer", version=1) == HubRef("org/kernels", "Layer", version=1)
    assert hub("org/kernels:Layer", revision="main", backend="cuda") == HubRef(
        "org/kernels", "Layer", "main", backend="cuda"
    )
    for ref, options in (
        ("org/kernels", {"version": 1}),
        (":Layer", {"version": 1}),
        ("org/kernels:Layer", {}),
        ("org/kernels:Layer", {"version": 1, "revision": "main"}),
    ):
        with pytest.raises(ValueError, match="got"):
            hub(ref, **options)


def test_layers_from_a_hub(monkeypatch, device):
    """The package ``kernels`` is replaced by a stand-in, because there is no hub here."""
    asked = []
    kernels = ModuleType("kernels")
    layers = SimpleNamespace(Gelu=nn.GELU)

    def get_kernel(repo, *, revision=None, version=None, backend=None, trust_remote_code=False):
        asked.append((repo, revision, version, backend, trust_remote_code))
        return SimpleNamespace(layers=layers)

    kernels.get_kernel = get_kernel
    model = nn.Sequential(nn.ReLU())
    monkeypatch.delenv("TWINKLE_TRUST_REMOTE_CODE", raising=False)
    with pytest.raises(ImportError, match="'kernels' is not installed"):
        kernelize(model, {nn.ReLU: hub("org/kernels:Gelu", version=1)})
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr("twinkle.kernel.replacement.requires", lambda package: None)
    with pytest.raises(UnsupportedError, match="TWINKLE_TRUST_REMOTE_CODE=1"):
        kernelize(model, {nn.ReLU: hub("org/kernels:Gelu", version=1)})
    assert not asked
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    with pytest.raises(InvalidInputError, match="one of its layers: Gelu"):
        kernelize(model, {nn.ReLU: hub("org/kernels:Silu", version=1)})
    kernelize(model, {nn.ReLU: {"cpu": hub("org/kernels:Gelu", revision="main")}})
    assert type(model[0]) is nn.GELU
    assert asked == [("org/kernels", None, 1, None, True), ("org/kernels", "main", None, None, True)]
