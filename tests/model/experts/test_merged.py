"""Adapters on experts, merged into the weights that are sent or written: the plain model with W + B A."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.models.experts_reference import ExpertsReference
from tests.support.models.reference import assert_tensors_close, with_random_weights
from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.model import LoraSpec, Trainer
from twinkle.model.multi_lora.outgoing import base_sources, merge_adapter
from twinkle.model.weights.buckets import TensorMeta
from twinkle.model.weights.sources import WeightSource

FAMILY = "qwen3_moe"
SPECS = {
    "all": LoraSpec(3, alpha=6, seed=1),
    "up and down": LoraSpec(4, alpha=3, seed=2, target_modules=["w3", "w2"]),
    "gate": LoraSpec(5, alpha=8, seed=3, target_modules=["w1", "o_proj"]),
}


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    made = tiny_trainer(tiny_model(FAMILY))
    for name, spec in SPECS.items():
        made.create_adapter(name, spec)
        made.restore(name, with_random_weights(made, name, seed=len(name)))
    return made


def read(source: WeightSource, name: str, size: int) -> np.ndarray:
    """Read a weight in pieces of this size."""
    meta = source.meta(name)
    out = torch.empty(meta.count)
    for start in range(0, meta.count, size):
        count = min(size, meta.count - start)
        source.read(TensorMeta(name, meta.shape, meta.dtype, start=start, count=count), out[start : start + count])
    return out.view(meta.shape).numpy()


def one_by_one(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights with the names of checkpoints in which each expert has weights of its own."""
    for name, weight in weights.items():
        front, _, last = name.rpartition(".")
        for expert, own in enumerate(weight) if front.endswith(".experts") else ():
            if last == "down_proj":
                yield f"{front}.{expert}.down_proj.weight", own
            else:
                gate, up = own.chunk(2)
                yield f"{front}.{expert}.gate_proj.weight", gate
                yield f"{front}.{expert}.up_proj.weight", up
        if not front.endswith(".experts"):
            yield name, weight


@pytest.mark.parametrize("name", SPECS)
def test_merged_weights_are_those_of_the_plain_model(trainer: Trainer, name: str) -> None:
    base = tiny_model(FAMILY)
    reference = ExpertsReference(base, SPECS[name], trainer.weights(name))
    plain = dict(base.named_parameters()) | reference.changed_weights()
    wanted: dict[str, torch.Tensor] = {key: each.detach() for key, each in plain.items()}
    fused = base_sources(trainer, name)
    assert_tensors_close({key: read(fused[key], key, 1000) for key in wanted}, to_numpy(wanted))
    apart = {key: WeightSource(each) for key, each in one_by_one(dict(base.named_parameters()))}
    merged = merge_adapter(apart, trainer, name, tied=False)
    expected = to_numpy(dict(one_by_one(wanted)))
    assert_tensors_close({key: read(merged[key], key, 77) for key in expected}, expected)


@pytest.mark.parametrize("targets", [None, ["in_proj_v", "in_proj_q"], ["in_proj_qkv"]])
def test_projections_of_linear_attention_are_merged_into_their_layer(targets: list[str] | None) -> None:
    trainer = tiny_trainer(tiny_model("qwen3_5"))
    trainer.create_adapter("a", LoraSpec(4, alpha=6, seed=1, target_modules=targets, rank_pattern={"in_proj_v": 2}))
    trainer.restore("a", with_random_weights(trainer, "a", seed=1))
    net, changed = "model.layers.0.linear_attn", trainer.weights("a")
    scalings = {"in_proj_v": 6 / 2}
    weight = tiny_model("qwen3_5").get_parameter(f"{net}.in_proj_qkv.weight").detach().numpy().copy()
    parts = trainer.architecture.split[0].parts
    bounds = np.cumsum([0, *(part.out_features for part in parts)])
    places = {name: slice(*bounds[i : i + 2]) for i, name in enumerate(("in_proj_q", "in_proj_k", "in_proj_v"))}
    for name, rows in {**places, "in_proj_qkv": slice(None)}.items():
        factors = [changed.get(f"base_model.model.{net}.{name}.lora_{each}.weight") for each in "BA"]
        if factors[0] is not None and factors[1] is not None:
            weight[rows] += scalings.get(name, 6 / 4) * factors[0] @ factors[1]
    key = f"{net}.in_proj_qkv.weight"
    assert_tensors_close({key: read(base_sources(trainer, "a")[key], key, 333)}, {key: weight})


def to_numpy(weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: each.detach().numpy() for name, each in weights.items()}
