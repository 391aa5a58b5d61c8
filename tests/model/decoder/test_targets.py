"""Which linear layers an adapter attaches to, and which specs are valid."""

import math

import peft
import pytest
from transformers import Gemma3Config

from tests.support.models.tiny_models import EXPERT_FAMILIES, FAMILIES, random_model, tiny_model, tiny_trainer
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model import LoraSpec
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.decoder.architecture import Architecture, read_architecture
from twinkle.model.decoder.targets import MAX_RANK, check_ranks, check_spec, select_targets, short_names

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def llama() -> Architecture:
    return read_architecture(tiny_model("llama"))


def names(architecture: Architecture, **fields: object) -> list[str]:
    return [target.name for target in select_targets(LoraSpec(rank=4, **fields), architecture)]


def layer(*modules: str) -> list[str]:
    """Return the names of these modules in both layers, in the model's order."""
    blocks = {**dict.fromkeys(ATTENTION, "self_attn"), **dict.fromkeys(MLP, "mlp")}
    attention, mlp = ([m for m in modules if m in block] for block in (ATTENTION, MLP))
    return [f"model.layers.{i}.{blocks[m]}.{m}" for group in (attention, mlp) for i in range(2) for m in group]


# --- switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "mlp", "unembed"),
    [(a, m, u) for a in (True, False) for m in (True, False) for u in (True, False) if a or m or u],
)
def test_switches(llama: Architecture, attention: bool, mlp: bool, unembed: bool) -> None:
    expected = layer(*ATTENTION * attention, *MLP * mlp) + ["lm_head"] * unembed
    assert names(llama, train_attn=attention, train_mlp=mlp, train_unembed=unembed) == expected


def test_all_switches_off_is_an_error(llama: Architecture) -> None:
    with pytest.raises(InvalidInputError, match=r"train_attn, train_mlp, train_unembed: .* at least one of them true"):
        names(llama, train_attn=False, train_mlp=False)


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_override_switches(llama: Architecture) -> None:
    assert names(llama, target_modules=["q_proj"], train_unembed=True) == layer("q_proj")


def test_order_is_the_models_and_duplicates_do_not_count(llama: Architecture) -> None:
    wanted = ["lm_head", "down_proj", "q_proj", "q_proj"]
    assert names(llama, target_modules=wanted) == [*layer("q_proj", "down_proj"), "lm_head"]


def test_longer_names(llama: Architecture) -> None:
    assert names(llama, target_modules=["mlp.up_proj"]) == layer("up_proj")
    assert names(llama, target_modules=["1.self_attn.q_proj"]) == ["model.layers.1.self_attn.q_proj"]
    assert names(llama, target_modules=["model.layers.0.mlp.up_proj"]) == ["model.layers.0.mlp.up_proj"]


def test_part_of_a_component_is_no_match(llama: Architecture) -> None:
    with pytest.raises(InvalidInputError, match="target_modules"):
        names(llama, target_modules=["proj"])


@pytest.mark.parametrize("wanted", [["query"], ["q_proj", "query"], ("embed_tokens",), ["self_attn"], [""]])
def test_unknown_names_list_the_known_ones(llama: Architecture, wanted: list[str]) -> None:
    with pytest.raises(InvalidInputError) as error:
        names(llama, target_modules=wanted)
    known = ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert str(error.value) == f"target_modules: got {wanted[-1]!r}, allowed: one of {known}"


def test_no_names_at_all(llama: Architecture) -> None:
    with pytest.raises(InvalidInputError, match=r"target_modules: got \[\], allowed: some of \['down_proj'"):
        names(llama, target_modules=[])


def test_all_linear_is_everything_but_the_head(llama: Architecture) -> None:
    assert names(llama, target_modules="all-linear", train_unembed=True) == layer(*ATTENTION, *MLP)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r".*\.(q|v)_proj", layer("q_proj", "v_proj")),
        (r".*layers\.1\..*up_proj", ["model.layers.1.mlp.up_proj"]),
        ("lm_head", ["lm_head"]),
    ],
)
def test_any_other_string_is_a_pattern_for_whole_names(llama: Architecture, pattern: str, expected: list[str]) -> None:
    assert names(llama, target_modules=pattern) == expected


@pytest.mark.parametrize("pattern", ["q_proj", ".*query", ""])
def test_a_pattern_that_matches_nothing(llama: Architecture, pattern: str) -> None:
    with pytest.raises(InvalidInputError, match=f"target_modules: got {pattern!r}, allowed: some of"):
        names(llama, target_modules=pattern)


def test_a_broken_pattern(llama: Architecture) -> None:
    with pytest.raises(InvalidInputError, match="allowed: a regular expression"):
        names(llama, target_modules="(q_proj")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EXPERT_FAMILIES])
@pytest.mark.parametrize("wanted", ["all-linear", r".*\.1\..*", ["o_proj", "dense", "lm_head", "out_proj"]])
def test_we_pick_what_peft_picks(family: str, wanted: str | list[str]) -> None:
    model = tiny_model(family)
    architecture = read_architecture(model)
    if isinstance(wanted, list):
        present = {name.rpartition(".")[2] for name in architecture.module_names}
        wanted = [name for name in wanted if name in present]
    ours = names(architecture, target_modules=wanted)
    if wanted == r".*\.1\..*":  # also matches norms, for which PEFT would fail
        wanted = r".*\.1\..*(proj.*|dense|fc1|fc2)"
    theirs = peft.get_peft_model(model, peft.LoraConfig(target_modules=wanted)).targeted_module_names
    assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear", "exclude_modules": ["o_proj", "0.mlp.up_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r".*mlp.*"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["proj", "self_attn"]},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 0},
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1, 7]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0], "exclude_modules": ["k_proj"]},
    ],
)
def test_we_leave_out_what_peft_leaves_out(llama: Architecture, fields: dict) -> None:
    config = peft.LoraConfig(**fields)
    theirs = peft.get_peft_model(tiny_model("llama"), config).targeted_module_names
    ours = select_targets(spec_from_peft(config.to_dict()), llama)
    assert sorted(target.name for target in ours) == sorted(theirs)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"exclude_modules": ["q_proj"]}, "exclude_modules"),
        ({"layers_to_transform": [5]}, "layers_to_transform"),
        ({"layers_to_transform": [0], "layers_pattern": "blocks"}, "layers_to_transform"),
    ],
)
def test_no_module_is_left(llama: Architecture, fields: dict, field: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        names(llama, target_modules=["q_proj"], **fields)
    assert error.value.field == field


def test_ranks_are_refused_by_module(llama: Architecture) -> None:
    spec = LoraSpec(
        4, target_modules=["q_proj", "up_proj"], rank_pattern={"1.mlp.up_proj": 9}, init_weights="orthogonal"
    )
    with pytest.raises(InvalidInputError, match=r"^the rank of model\.layers\.1\.mlp\.up_proj: got 9, .* an even"):
        check_ranks(spec, select_targets(spec, llama))


# --- names in adapter_config.json -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, sorted(ATTENTION + MLP)),
        ({"train_mlp": False, "train_unembed": True}, ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]),
        ({"target_modules": ["0.self_attn.q_proj"]}, ["model.layers.0.self_attn.q_proj"]),
        ({"target_modules": r".*(0.*q|up)_proj"}, sorted(["model.layers.0.self_attn.q_proj", *layer("up_proj")])),
    ],
)
def test_short_names(llama: Architecture, fields: dict, expected: list[str]) -> None:
    targets = select_targets(LoraSpec(rank=4, **fields), llama)
    assert short_names(targets, llama) == expected
    again = select_targets(LoraSpec(rank=4, target_modules=short_names(targets, llama)), llama)
    assert again == targets


def test_short_names_do_not_reach_into_a_vision_tower() -> None:
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = Gemma3Config(
        text_config=FAMILIES["gemma3"]().to_dict(),
        vision_config={**vision, "hidden_size": 16, "intermediate_size": 16},
        mm_tokens_per_image=4,
    )
    architecture = read_architecture(random_model(config))
    attention = select_targets(LoraSpec(rank=4, target_modules=["q_proj"]), architecture)
    assert short_names(attention, architecture) == [
        f"model.language_model.layers.{i}.self_attn.q_proj" for i in range(2)
    ]
    mlp = select_targets(LoraSpec(rank=4, target_modules=["up_proj"]), architecture)
    assert short_names(mlp, architecture) == ["up_proj"]


# --- PEFT's config ----------------------------------------------------------------------------------------------------


def test_adapter_from_lora_config() -> None:
    trainer = tiny_trainer(tiny_model("llama"))
    config = peft.LoraConfig(r=6, lora_alpha=9, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    spec = trainer.create_adapter_from_peft("a", config.to_dict())
    assert (spec.rank, spec.alpha, spec.target_modules) == (6, 9.0, ("lm_head", "q_proj"))
    model = peft.get_peft_model(tiny_model("llama"), config)
    theirs = {name: tuple(tensor.shape) for name, tensor in peft.get_peft_model_state_dict(model).items()}
    ours = {name: array.shape for name, array in trainer.weights("a").items()}
    assert ours == {name: shape for name, shape in theirs.items() if "lora" in name}


def test_lora_config_with_all_linear() -> None:
    trainer = tiny_trainer(tiny_model("phi3"))
    trainer.create_adapter_from_peft("a", peft.LoraConfig(target_modules="all-linear").to_dict())
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in trainer.weights("a")}
    assert modules == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


def test_lora_config_that_cannot_be_used_makes_no_adapter() -> None:
    trainer = tiny_trainer(tiny_model("llama"))
    for fields, error in [
        ({"target_modules": ["q_proj"], "use_dora": True}, UnsupportedError),
        ({"target_modules": ["query"]}, InvalidInputError),
        ({"target_modules": ["q_proj"], "r": MAX_RANK + 1}, InvalidInputError),
    ]:
        with pytest.raises(error):
            trainer.create_adapter_from_peft("a", peft.LoraConfig(**fields).to_dict())
    assert trainer.adapter_ids() == []


# --- specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("rank", 0, f"an integer in [1, {MAX_RANK}]"),
        ("rank", -1, f"an integer in [1, {MAX_RANK}]"),
        ("rank", MAX_RANK + 1, f"an integer in [1, {MAX_RANK}]"),
        ("rank", 8.0, f"an integer in [1, {MAX_RANK}]"),
        ("rank", True, f"an integer in [1, {MAX_RANK}]"),
        ("rank", None, f"an integer in [1, {MAX_RANK}]"),
        ("alpha", 0, "a finite number > 0"),
        ("alpha", -1.0, "a finite number > 0"),
        ("alpha", math.nan, "a finite number > 0"),
        ("alpha", math.inf, "a finite number > 0"),
        ("alpha", 10**400, "a finite number > 0"),
        ("alpha", True, "a finite number > 0"),
        ("alpha", "32", "a finite number > 0"),
        ("seed", 1.5, "a 64-bit integer or None"),
        ("seed", True, "a 64-bit integer or None"),
        ("seed", 2**63, "a 64-bit integer or None"),
        ("seed", -(2**63) - 1, "a 64-bit integer or None"),
        ("target_modules", 3, 'module names, "all-linear", a pattern or None'),
        ("target_modules", ["q_proj", 3], 'module names, "all-linear", a pattern or None'),
        ("target_modules", {"q_proj": 1}, 'module names, "all-linear", a pattern or None'),
        ("target_modules", b"q_proj", 'module names, "all-linear", a pattern or None'),
        ("dropout", 1, "a number in [0, 1)"),
        ("dropout", math.nan, "a number in [0, 1)"),
        ("use_rslora", 1, "True or False"),
        ("rank_pattern", {"": 3}, "a mapping of module names or patterns"),
        ("rank_pattern['q']", {"q": MAX_RANK + 1}, f"an integer in [1, {MAX_RANK}]"),
        ("alpha_pattern['q']", {"q": 0}, "a finite number > 0"),
        ("exclude_modules", [1], "module names, a pattern or None"),
        ("layers_to_transform", "0", "numbers of layers, counted from 0, or None"),
        ("layers_pattern", "layers", "nothing without layers_to_transform"),
        ("init_weights", "pissa", "one of (True, False, 'gaussian', 'orthogonal')"),
    ],
)
def test_wrong_specs_name_the_field(field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        check_spec(LoraSpec(**{"rank": 8, field.partition("[")[0]: value}))
    assert error.value.field == field
    assert error.value.allowed == allowed


@pytest.mark.parametrize(
    "spec", [LoraSpec(1, seed=0), LoraSpec(MAX_RANK, alpha=0.5, seed=-(2**63)), LoraSpec(3, seed=2**63 - 1)]
)
def test_right_specs_stay_as_they_are(spec: LoraSpec) -> None:
    assert check_spec(spec) is spec


def test_a_seed_is_drawn_and_told() -> None:
    first, second = check_spec(LoraSpec(rank=8)), check_spec(LoraSpec(rank=8))
    assert isinstance(first.seed, int)
    assert first.seed != second.seed
    assert check_spec(first) is first
