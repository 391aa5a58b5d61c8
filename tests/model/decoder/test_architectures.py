"""Every family: a packed batch of two tenants gives the same results as each sequence alone on plain PEFT."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models.reference import (
    Reference,
    assert_logprobs_close,
    assert_tensors_close,
    random_datum,
    tolerance_of,
)
from tests.support.models.tiny_models import (
    EXPERT_FAMILIES,
    FAMILIES,
    LONG,
    PADDED_FAMILIES,
    WINDOW,
    add_trained_adapter,
    random_model,
    the_result,
    tiny_config,
    tiny_model,
    tiny_trainer,
)
from tests.support.thorough import by_default
from twinkle import hub
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model import Datum, LoraSpec, Trainer, TrainItem, TrainResult, adopt_model
from twinkle.model.decoder.architecture import TESTED_FAMILIES, read_architecture
from twinkle.model.decoder.attention import PACKED
from twinkle.model.decoder.loading import load_model
from twinkle.model.trainer import self_check

# Sequences of both tenants: one token, neighbours of equal length, lengths beyond the sliding window and on both sides
# of LONG, and longer than the blocks of 64 tokens of linear attention.
LENGTHS = {"a": (19, 5, 33), "b": (70, 1, 19, 19, LONG, LONG + 1)}

# The families that run by default where a test repeats itself for each: plain, with windows, with two kinds of rotary
# embeddings, with sinks and experts, and with linear attention.
FEW = ("llama", "gemma3", "phi3-longrope", "gpt_oss", "qwen3_5")


def specs(family: str) -> dict[str, LoraSpec]:
    return {
        "a": LoraSpec(rank=4, seed=1, train_mlp=family not in EXPERT_FAMILIES),
        "b": LoraSpec(rank=12, seed=2, train_mlp=False, train_unembed=True),
    }


def two_tenants(family: str) -> tuple[PreTrainedModel, Trainer, dict[str, list[Datum]]]:
    model = tiny_model(family)
    trainer = tiny_trainer(model)
    for adapter_id, spec in specs(family).items():
        add_trained_adapter(trainer, adapter_id, spec, model)
    data = {
        adapter_id: [random_datum(model, "cross_entropy", n, seed=100 * len(lengths) + n) for n in lengths]
        for adapter_id, lengths in LENGTHS.items()
    }
    return model, trainer, data


def forward_backward(trainer: Trainer, data: dict[str, list[Datum]]) -> dict[str, TrainResult]:
    outcomes = trainer.forward_backward([TrainItem(adapter_id, each) for adapter_id, each in data.items()])
    return {adapter_id: the_result(outcome) for adapter_id, outcome in zip(data, outcomes, strict=True)}


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_each_sequence_alone(family: str) -> None:
    model, trainer, data = two_tenants(family)
    results = forward_backward(trainer, data)
    for adapter_id, result in results.items():
        plain = Reference(model, trainer.spec(adapter_id), trainer.weights(adapter_id))
        expected = plain.forward_backward(TrainItem(adapter_id, data[adapter_id]))
        assert_logprobs_close(result.logprobs, expected.logprobs)
        assert_tensors_close(trainer.gradients(adapter_id), plain.gradients(), tolerance_of(family))


@pytest.mark.matrix
@pytest.mark.parametrize("family", by_default(*FEW, of=FAMILIES))
def test_a_sequence_does_not_see_its_neighbours(family: str) -> None:
    """One sequence gets other tokens of the same length.

    All others keep their results, bit by bit if the shapes stay the same.
    """
    model, trainer, data = two_tenants(family)
    before = forward_backward(trainer, data)
    gradients = trainer.gradients("a")
    for adapter_id in data:
        trainer.zero_grad(adapter_id)
    changed = {**data, "b": list(data["b"])}
    changed["b"][2] = random_datum(model, "cross_entropy", 19, seed=77)
    after = forward_backward(trainer, changed)
    assert np.abs(after["b"].logprobs[2] - before["b"].logprobs[2]).max() > 0.1
    pairs = [
        (after[adapter_id].logprobs[number], before[adapter_id].logprobs[number])
        for adapter_id in data
        for number in range(len(data[adapter_id]))
        if (adapter_id, number) != ("b", 2)
    ]
    # the number of tokens per expert, and so the shape of its product, depends on all sequences
    if family in EXPERT_FAMILIES:
        assert_logprobs_close([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
        assert_tensors_close(trainer.gradients("a"), gradients)
    else:
        assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)
        assert all(np.array_equal(trainer.gradients("a")[name], gradients[name]) for name in gradients)


@pytest.mark.matrix
@pytest.mark.parametrize("family", by_default(*FEW, of=FAMILIES))
def test_forward_and_recomputation_give_the_same(family: str) -> None:
    model, trainer, data = two_tenants(family)
    results = forward_backward(trainer, data)
    scored = trainer.forward([TrainItem(adapter_id, each) for adapter_id, each in data.items()])
    for result, outcome in zip(results.values(), scored, strict=True):
        assert_logprobs_close(the_result(outcome).logprobs, result.logprobs)
    short = tiny_trainer(model, max_tokens_per_batch=18)  # longer sequences use activation checkpointing
    for adapter_id in data:
        short.restore(adapter_id, trainer.snapshot(adapter_id))
        short.zero_grad(adapter_id)
    for adapter_id, result in forward_backward(short, data).items():
        assert_logprobs_close(result.logprobs, results[adapter_id].logprobs)
        assert_tensors_close(short.gradients(adapter_id), trainer.gradients(adapter_id))


def test_every_tested_family_is_tested() -> None:
    assert {make().model_type for make in FAMILIES.values()} == TESTED_FAMILIES


@pytest.mark.matrix
@pytest.mark.parametrize("family", [*FAMILIES, *PADDED_FAMILIES])
def test_only_models_with_unknown_state_are_padded(family: str) -> None:
    assert read_architecture(adopt_model(tiny_model(family))).padded == (family in PADDED_FAMILIES)


def test_the_tests_notice_what_they_are_for() -> None:
    """Shows that windows, soft-capping and long frequencies change the results on these sequences."""
    for family, changes in {
        "mistral": {"sliding_window": None},
        "gemma2": {"attn_logit_softcapping": None},
        "gemma3": {"sliding_window": 4 * WINDOW},
        "gpt_oss": {"sliding_window": 4 * WINDOW},
    }.items():
        config = FAMILIES[family]()
        model, other = random_model(config), random_model(type(config)(**{**config.to_dict(), **changes}))
        tokens = torch.arange(3, 36)[None]
        with torch.no_grad():
            assert (model(tokens).logits - other(tokens).logits).abs().max() > 0.01, family


# --- real files -------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_text_part_of_a_vision_language_checkpoint(tmp_path) -> None:
    """Qwen3.5 is published with a vision tower; only its decoder is loaded, under the decoder's names."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 32}
    config = Qwen3_5Config(
        text_config=FAMILIES["qwen3_5"]().to_dict(),
        vision_config={**vision, "hidden_size": 16, "intermediate_size": 16},
    )
    whole = Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    model = load_model(hub.resolve(str(tmp_path)), torch.float32, torch.device("cpu"))
    trainer = Trainer(model, model_id="tiny")
    trainer.create_adapter("a", LoraSpec(rank=4))
    datum = random_datum(model, "cross_entropy", 19, seed=0)
    result = the_result(trainer.forward([TrainItem("a", [datum])])[0])
    with torch.no_grad():
        logits = whole(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0]
    assert_logprobs_close(result.logprobs, [expected.numpy()])
    assert trainer.architecture.layers_path == "model.layers"


@pytest.mark.matrix
def test_layers_of_a_vision_tower_are_not_taken_for_the_decoder() -> None:
    """Gemma 3 is loaded whole; the wrapper around its decoder is checked like an unknown family."""
    from transformers import Gemma3Config

    vision = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = Gemma3Config(
        text_config=FAMILIES["gemma3"]().to_dict(),
        vision_config={**vision, "hidden_size": 16, "intermediate_size": 16},
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
        mm_tokens_per_image=4,
    )
    architecture = tiny_trainer(random_model(config)).architecture
    assert architecture.layers_path == "model.language_model.layers"
    assert all(target.name.startswith("model.language_model.") for target in architecture.linear)


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_longrope_separates_lengths_at_its_threshold() -> None:
    length_class = read_architecture(tiny_model("phi3-longrope")).length_class
    assert [length_class(length) for length in (1, LONG, LONG + 1, 128)] == [0, 0, 1, 1]
    assert read_architecture(tiny_model("llama")).length_class(100) == 0


def test_dynamic_frequencies_end_at_the_length_where_they_would_change() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = tiny_config("LlamaConfig", rope_parameters=rope, max_position_embeddings=32)
    model = random_model(config)
    trainer = tiny_trainer(model)
    trainer.create_adapter("a", LoraSpec(rank=4))
    long, short = (random_datum(model, "cross_entropy", length, seed=0) for length in (33, 32))
    refused = trainer.forward([TrainItem("a", [long])])[0]
    assert isinstance(refused.error, InvalidInputError)
    assert "1 ≤ T ≤ 32" in str(refused.error)
    the_result(trainer.forward([TrainItem("a", [short])])[0])


# --- unsupported models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "gpt2: no list of 2 decoder layers named 'layers'"),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "gemma3_text: bidirectional attention"),
    ],
)
def test_unsupported_models_say_why(config: str, values: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        tiny_trainer(random_model(tiny_config(config, **values)))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("spec", "field"),
    [(LoraSpec(rank=4), "train_mlp"), (LoraSpec(rank=4, target_modules="all-linear"), "target_modules")],
)
def test_experts_of_an_unknown_form_take_no_adapters(spec: LoraSpec, field: str) -> None:
    model = tiny_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts.third_proj = torch.nn.Parameter(torch.zeros(2))
    trainer = tiny_trainer(model)
    with pytest.raises(UnsupportedError, match=f"{field}: qwen3_moe has experts of a form on which LoRA is not"):
        trainer.create_adapter("a", spec)
    assert trainer.adapter_ids() == []


# --- families without a test of their own -----------------------------------------------------------------------------

UNPINNED = {
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "granite": (
        "GraniteConfig",
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smollm3": ("SmolLM3Config", {}),
    "stablelm": ("StableLmConfig", {}),  # does not pass sequence bounds to its attention, so it runs padded
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
}
PADDED = {"lfm2", "stablelm"}


@pytest.mark.matrix
@pytest.mark.parametrize("family", by_default("lfm2", "olmo3", of=UNPINNED))
def test_other_families_pass_their_own_check(family: str) -> None:
    name, values = UNPINNED[family]
    model = random_model(tiny_config(name, **values))
    trainer = tiny_trainer(model)
    assert trainer.architecture.padded == (family in PADDED)
    add_trained_adapter(trainer, "a", LoraSpec(rank=4, seed=1), model)
    item = TrainItem("a", [random_datum(model, "cross_entropy", length, seed=length) for length in (19, 5, 33)])
    result = the_result(trainer.forward_backward([item])[0])
    plain = Reference(model, trainer.spec("a"), trainer.weights("a"))
    assert_logprobs_close(result.logprobs, plain.forward_backward(item).logprobs)
    assert_tensors_close(trainer.gradients("a"), plain.gradients())


def test_a_family_whose_layers_take_no_batch_is_refused() -> None:
    config = tiny_config("GPTNeoXJapaneseConfig", intermediate_multiple_size=2)
    with pytest.raises(UnsupportedError, match="gpt_neox_japanese: its layers cannot serve several adapters at once"):
        tiny_trainer(random_model(config))


def olmo2() -> PreTrainedModel:
    return random_model(tiny_config("Olmo2Config"))


def test_a_head_that_we_compute_wrongly_is_found() -> None:
    """The model has a logit scale under an unknown name."""
    model = olmo2()
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.1)
    with pytest.raises(
        UnsupportedError, match=r"^olmo2: run packed, its log-probabilities differ .* by \d\.\de.\d\d of"
    ):
        tiny_trainer(model)


def test_neighbours_that_mix_are_found() -> None:
    """Each token reads the one before it, which in a packed row may belong to another sequence."""
    model = olmo2()

    def shift(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0] + 0.1 * torch.nn.functional.pad(args[0], (0, 0, 1, 0))[:, :-1],)

    model.model.layers[0].mlp.register_forward_pre_hook(shift)
    with pytest.raises(UnsupportedError, match="olmo2: run packed"):
        tiny_trainer(model)


def test_rows_in_another_order_are_found() -> None:
    """A block that reverses its rows internally would give each tenant the adapter of another one."""
    model = random_model(tiny_config("StableLmConfig"))
    mlp = model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda module, args: (args[0].flip(0),))
    mlp.register_forward_hook(lambda module, args, output: output.flip(0))
    with pytest.raises(UnsupportedError, match="stablelm: run padded"):
        tiny_trainer(model)


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = adopt_model(olmo2())
    before = [module for module in model.modules() if module._forward_hooks]
    assert self_check.plain_logprobs(model, read_architecture(model)) is not None
    assert model.config._attn_implementation == PACKED
    assert [module for module in model.modules() if module._forward_hooks] == before == []
    assert self_check.plain_logprobs(adopt_model(tiny_model("llama")), read_architecture(tiny_model("llama"))) is None


@pytest.mark.parametrize("replayed", [True, False])
def test_the_check_in_bf16_does_not_take_other_experts_for_an_error(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding sends tokens to other experts. With the plain model's routes the rest of the difference is small."""
    config = tiny_config(
        "MixtralConfig", num_hidden_layers=12, num_local_experts=64, num_experts_per_tok=8, sliding_window=None
    )
    monkeypatch.setattr(self_check, "_BOUND_BF16", 0.05)
    if not replayed:
        monkeypatch.setattr(self_check, "watch_routers", lambda _: None)
    with nullcontext() if replayed else pytest.raises(UnsupportedError, match="differ from the model's own"):
        tiny_trainer(random_model(config, 2).bfloat16(), memory_budget_bytes=2**30, max_tokens_per_batch=64)
