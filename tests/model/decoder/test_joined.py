"""Weights of layers with the same input are moved together: numbers, names and copies stay as they were."""

import copy

import pytest
import torch
from torch import nn

from tests.support.models.tiny_models import FAMILIES, tiny_model, tiny_trainer
from twinkle.model import Trainer, adopt_model
from twinkle.model.decoder.base_weights import named_weights, put_weights
from twinkle.model.decoder.joined import SPARE_ROWS, empty_like, join_weights, joint, with_spare_rows

HAVE_SETS = {
    "llama",
    "llama-tied",
    "qwen2",
    "qwen2-sliding",
    "qwen3",
    "qwen3_5",
    "gemma",
    "gemma2",
    "gemma3",
    "mistral",
}


@pytest.mark.parametrize("spare_rows", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_with_joined_weights(family: str, spare_rows: bool) -> None:
    model = tiny_model(family)
    joined = copy.deepcopy(model)
    count = join_weights(joined, spare_rows=spare_rows)
    assert count > 0 or family not in HAVE_SETS
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(joined(ids).logits, model(ids).logits, rtol=0, atol=0)
    for (name, one), (same, other) in zip(model.state_dict().items(), joined.state_dict().items(), strict=True):
        assert name == same
        assert torch.equal(one, other)


def test_there_is_no_second_copy() -> None:
    model = tiny_model("qwen2")
    join_weights(model)
    attention = model.model.layers[0].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    whole, bias = joint([each.weight for each in linears]), joint([each.bias for each in linears])
    assert whole is not None
    assert bias is not None
    assert whole.shape == (sum(each.out_features for each in linears), 32)
    with torch.no_grad():
        attention.k_proj.weight.zero_()
        attention.v_proj.bias.fill_(7)
    first, second, _ = whole.split([each.out_features for each in linears])
    assert not second.any()
    assert first.any()
    assert (bias[-attention.v_proj.out_features :] == 7).all()
    assert whole.untyped_storage().nbytes() == whole.nbytes


def test_spare_rows_are_behind_the_weights() -> None:
    model = tiny_model("qwen2")
    join_weights(model, spare_rows=True)
    attention = model.model.layers[0].self_attn
    sets = [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [model.model.layers[0].mlp.up_proj],
    ]
    for linears in sets[:2]:
        whole = with_spare_rows([each.weight for each in linears])
        assert whole is not None
        outputs, spare = sum(each.out_features for each in linears), SPARE_ROWS * len(linears)
        assert whole.shape == (outputs + spare, linears[0].in_features)
        assert torch.equal(whole[:outputs], torch.cat([each.weight.detach() for each in linears]))
        assert not whole[outputs:].any()
        whole[outputs:] = 3.0
        assert not any((each.weight == 3.0).any() for each in linears)
    biases = with_spare_rows([each.bias for each in sets[0]])
    assert biases is not None
    assert not biases[-3 * SPARE_ROWS :].any()
    assert with_spare_rows([attention.q_proj.weight]) is None  # other weights are behind it
    assert with_spare_rows([attention.q_proj.weight, attention.k_proj.weight]) is None
    assert with_spare_rows([sets[2][0].weight]) is None
    other = nn.Parameter(torch.empty(0))
    other.data = attention.o_proj.weight.data
    assert with_spare_rows([other]) is None  # it belongs to another model
    own = attention.o_proj.weight.data
    attention.o_proj.weight.data = own.clone()
    assert with_spare_rows([attention.o_proj.weight]) is None
    attention.o_proj.weight.data = own
    assert with_spare_rows([attention.o_proj.weight]) is not None
    join_weights(model)  # moves them again
    assert with_spare_rows([each.weight for each in sets[0]]) is None


def test_spare_rows_have_one_user_at_a_time() -> None:
    class User:
        pass

    engine = tiny_trainer(tiny_model("llama")).engine
    first, second = User(), User()
    assert engine.take_spare_rows(first)
    assert not engine.take_spare_rows(second)
    assert engine.take_spare_rows(first)
    del first
    assert engine.take_spare_rows(second)


def test_only_layers_of_the_llama_shape_have_spare_rows() -> None:
    model = tiny_model("gemma")
    join_weights(model, spare_rows=True)
    attention = model.model.layers[0].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert joint([each.weight for each in linears]) is not None
    assert with_spare_rows([each.weight for each in linears]) is None
    assert with_spare_rows([attention.o_proj.weight]) is None


def test_parts_that_do_not_follow_each_other_are_not_joined() -> None:
    whole = torch.arange(24.0).view(6, 4)
    parts = list(whole.split([1, 2, 3]))
    joined = joint(parts)
    assert joined is not None
    assert torch.equal(joined, whole)
    assert joint([parts[1], parts[0]]) is None
    assert joint([parts[0], parts[2]]) is None
    assert joint([parts[0], parts[1].clone()]) is None
    assert joint([parts[0], parts[1].double()]) is None
    assert joint([whole[:, :2]]) is None  # not contiguous


def test_copies_of_joined_weights_are_joined() -> None:
    q, k = torch.randn(5, 4).split([2, 3])
    weights = {"k": k, "other": torch.randn(3), "q": q, "scalar": torch.tensor(1.0)}
    copies = empty_like(weights)
    assert list(copies) == list(weights)
    assert {name: copy.shape for name, copy in copies.items()} == {name: each.shape for name, each in weights.items()}
    assert joint([copies["q"], copies["k"]]) is not None
    for name, each in weights.items():
        assert copies[name].data_ptr() != each.data_ptr()


def test_a_trainers_weights_are_found_by_their_names() -> None:
    model = tiny_model("llama")
    plain = tiny_trainer(model)
    join_weights(model)
    joined = Trainer(adopt_model(model), model_id="tiny")
    theirs = named_weights(plain.engine.model)
    ours = named_weights(joined.engine.model)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    name = "model.layers.1.self_attn.k_proj.weight"
    put_weights(joined.engine.model, [(name, torch.ones_like(ours[name]))])
    assert (named_weights(joined.engine.model)[name] == 1).all()
    assert torch.equal(ours["model.layers.1.self_attn.q_proj.weight"], theirs["model.layers.1.self_attn.q_proj.weight"])


def test_layers_of_unequal_kind_stay_apart() -> None:
    block = nn.Module()
    block.gate_proj, block.up_proj = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)
    assert join_weights(block) == 1  # the weights; only one of them has a bias
    block.gate_proj, block.up_proj = nn.Linear(4, 6), nn.Linear(5, 6)
    assert join_weights(block) == 1  # the biases
