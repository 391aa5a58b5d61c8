"""Patches of models: their interface, the output head taken out and put back, and a model's apply_patch."""

from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.support.models.plain_training import LORA, MODEL, feature, plain_model
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.patch import (
    NoSplitModulesPatch,
    Patch,
    TransformersEmbeddingPatch,
    TransformersFusedCEPatch,
    apply_context,
    apply_patch,
    get_lm_head_model,
)

IDS = torch.tensor([[3, 5, 7, 9]])


class Renamed(Patch):
    """Changes an attribute, and back."""

    def __call__(self, module, name="new"):
        module.before, module.name = module.name, name
        return name

    def unpatch(self, module, name="new"):
        module.name = module.before


def test_a_patch_is_applied_and_undone():
    thing = SimpleNamespace(name="old")
    assert apply_patch(thing, Renamed) == "new"
    assert apply_patch(thing, Renamed(), name="newer") == "newer"
    thing.name = "old"
    with apply_context(thing, Renamed, "inside") as result:
        assert (result, thing.name) == ("inside", "inside")
    assert thing.name == "old"
    with pytest.raises(ZeroDivisionError), apply_context(thing, Renamed):
        _ = 1 / 0
    assert thing.name == "old"


def test_mistakes_with_patches():
    with pytest.raises(UnknownNameError, match="NoSplitModulesPatch"):
        apply_patch(SimpleNamespace(), "NoSplit")
    with pytest.raises(InvalidInputError, match="Patch: got"):
        apply_patch(SimpleNamespace(), int)
    with pytest.raises(UnsupportedError, match="Patch: a patch defines __call__"):
        apply_patch(SimpleNamespace(), Patch)
    with pytest.raises(UnsupportedError, match="Patch: this patch cannot be undone"):
        Patch().unpatch(SimpleNamespace())


def test_classes_that_stay_on_one_device():
    model = SimpleNamespace(_no_split_modules=["A"])
    with apply_context(model, "NoSplitModulesPatch", {"B"}):  # by name
        assert model._no_split_modules == ["B"]
    assert model._no_split_modules == ["A"]
    apply_patch(model, NoSplitModulesPatch(["C"]))
    apply_patch(model, NoSplitModulesPatch, module_names=["D"])
    assert model._no_split_modules == ["D"]
    with pytest.raises(InvalidInputError, match="module_names: got"):
        apply_patch(model, NoSplitModulesPatch)


@pytest.fixture(scope="module")
def llama():
    return plain_model()


def capped_model():
    """Return a model that caps its logits after the head, so that they are no hidden states without it either."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "final_logit_softcapping": 1.0}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).eval()


@pytest.mark.parametrize("kind", ["llama", "peft", "capped"])
@torch.no_grad()
def test_the_head_is_taken_out_and_put_back(kind, llama):
    model = capped_model() if kind == "capped" else plain_model() if kind == "peft" else llama
    hidden = model.base_model(IDS).last_hidden_state
    logits = model(IDS).logits
    if kind == "peft":
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    head = get_lm_head_model(model).get_output_embeddings()
    with apply_context(model, TransformersEmbeddingPatch):
        assert torch.equal(model(input_ids=IDS)["features"], hidden)
        assert torch.equal(model(input_ids=IDS)["features"], hidden)  # nothing is left of the first pass
        with pytest.raises(InvalidInputError, match="without a patch of its head"):
            apply_patch(model, TransformersFusedCEPatch)
    with apply_context(model, "TransformersFusedCEPatch"):
        outputs = model(input_ids=IDS)
        assert torch.equal(outputs["logits"], hidden)
        assert outputs["lm_head"] is head
    assert torch.equal(model(input_ids=IDS).logits, logits)
    assert "features" not in model(input_ids=IDS)


def test_a_model_without_a_head(llama):
    wrapped = nn.Module()
    wrapped.module = llama  # as DDP wraps it
    assert get_lm_head_model(wrapped) is llama
    with pytest.raises(InvalidInputError, match="a model with an output head"):
        get_lm_head_model(llama.base_model)


def test_models_apply_patches():
    model = TransformersModel(model_id=MODEL, device="cpu")
    model.apply_patch(NoSplitModulesPatch, module_names=["LlamaDecoderLayer"])
    assert model.model._no_split_modules == ["LlamaDecoderLayer"]
    model.apply_patch("NoSplitModulesPatch", {"LlamaMLP"})
    assert model.model._no_split_modules == ["LlamaMLP"]
    with pytest.raises(UnsupportedError, match="TransformersEmbeddingPatch: use task"):
        model.apply_patch(TransformersEmbeddingPatch)
    assert model.forward_backward(inputs=[feature(6, seed=0)])["loss"] > 0
    shared = MultiLoraTransformersModel(model_id=MODEL, device="cpu")
    with pytest.raises(UnsupportedError, match="adapters share their base model"):
        shared.apply_patch(NoSplitModulesPatch, module_names=["LlamaMLP"])
