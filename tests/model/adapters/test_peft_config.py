"""Our interpretation of LoraConfig, compared with the installed PEFT."""

import dataclasses
import json
from pathlib import Path

import peft
import pytest

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.adapters import peft_config as module
from twinkle.model.adapters.peft_config import peft_config, spec_from_peft
from twinkle.model.types import LoraSpec


def test_our_tables_hold_every_field_of_peft_with_its_default() -> None:
    """Fails if a new PEFT has a new field: decide in which table of peft_config.py it belongs."""
    fields = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
    tables = [set(module.READ), set(module.INFORMATIVE), set(module.RESTRICTED), set(module.UNIMPLEMENTED)]
    assert set().union(*tables) == set(fields)
    assert sum(len(table) for table in tables) == len(fields)
    for name, ours in {**module.READ, **module.UNIMPLEMENTED}.items():
        field = fields[name]
        theirs = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        assert (name, type(ours), ours) == (name, type(theirs), theirs)


def test_reads_lora_config() -> None:
    config = peft.LoraConfig(r=16, lora_alpha=24, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    assert spec_from_peft(config.to_dict()) == LoraSpec(rank=16, alpha=24.0, target_modules=("q_proj", "v_proj"))


def test_reads_the_file_that_peft_writes(tmp_path: Path) -> None:
    peft.LoraConfig(r=4, target_modules=["q_proj"], base_model_name_or_path="x/y", revision="main").save_pretrained(
        tmp_path
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert spec_from_peft(config) == LoraSpec(rank=4, alpha=8.0, target_modules=("q_proj",))


def test_fields_left_out_have_the_defaults_of_peft() -> None:
    default = peft.LoraConfig()
    spec = spec_from_peft({"target_modules": ["q_proj"]})
    assert (spec.rank, spec.alpha) == (default.r, default.lora_alpha)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["b", "a", "b"], ("a", "b")),
        ({"b", "a"}, ("a", "b")),
        ("all-linear", "all-linear"),
        ("All-Linear", "all-linear"),
        (["all-linear"], "all-linear"),
        (r".*\.q_proj", r".*\.q_proj"),
    ],
)
def test_target_modules(given: object, ours: object) -> None:
    assert spec_from_peft({"target_modules": given}).target_modules == ours


@pytest.mark.parametrize("value", [None, [], "", ["q_proj", 1], [""], 3])
def test_target_modules_must_be_named(value: object) -> None:
    with pytest.raises(InvalidInputError, match="target_modules: got "):
        spec_from_peft({"target_modules": value})


@pytest.mark.parametrize("value", [0, -1, 8.0, True, "8", None])
def test_rank_is_a_positive_integer(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^r: got "):
        spec_from_peft({"r": value, "target_modules": "all-linear"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "8", None, 10**400])
def test_alpha_is_a_finite_number(value: object) -> None:
    with pytest.raises(InvalidInputError, match="lora_alpha: got "):
        spec_from_peft({"lora_alpha": value, "target_modules": "all-linear"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_lora_weights", "eva"),
        ("init_lora_weights", None),
        ("lora_bias", True),
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("use_dora", True),
        ("field_of_tomorrow", 1),
        ("field_of_tomorrow", "on"),
    ],
)
def test_refuses_what_we_do_not_implement(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError) as error:
        spec_from_peft({"target_modules": "all-linear", name: value})
    assert str(error.value).endswith(f": {name}={value!r}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [5]),
    ],
)
def test_refuses_what_would_change_the_shared_base_model(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError) as error:
        spec_from_peft({"target_modules": "all-linear", name: value})
    reason = "would change weights of the base model, which all adapters share"
    assert str(error.value).endswith(f"(TransformersModel hands them to PEFT): {name}={value!r} ({reason})")


def test_target_parameters_stand_alone_or_beside_modules() -> None:
    alone = peft.LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"]).to_dict()
    assert spec_from_peft(alone).target_modules == ()
    assert spec_from_peft(alone).target_parameters == ("experts.down_proj", "experts.gate_up_proj")
    beside = spec_from_peft({"target_modules": "all-linear", "target_parameters": ["experts.down_proj"]})
    assert (beside.target_modules, beside.target_parameters) == ("all-linear", ("experts.down_proj",))
    with pytest.raises(InvalidInputError, match=r"target_parameters: got 'experts', allowed: a list"):
        spec_from_peft({"target_modules": "all-linear", "target_parameters": "experts"})


def test_names_all_offending_fields_at_once() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], use_dora=True, lora_dropout=0.1)
    with pytest.raises(UnsupportedError, match=r": lora_bias=True, use_dora=True$"):
        spec_from_peft({**config.to_dict(), "lora_bias": True})


def test_reads_the_options_of_lora_config() -> None:
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.05,
        use_rslora=True,
        rank_pattern={"v_proj": 4, "q_proj": 16},
        alpha_pattern={"v_proj": 2},
        exclude_modules=["o_proj", "k_proj"],
        layers_to_transform=[2, 0],
        layers_pattern="layers",
        init_lora_weights="gaussian",
    )
    spec = spec_from_peft(config.to_dict())
    assert (spec.dropout, spec.use_rslora, spec.init_weights) == (0.05, True, "gaussian")
    assert list(spec.rank_pattern.items()) == [("v_proj", 4), ("q_proj", 16)]
    assert (spec.alpha_pattern, spec.exclude_modules) == ({"v_proj": 2.0}, ("k_proj", "o_proj"))
    assert (spec.layers_to_transform, spec.layers_pattern) == ((0, 2), "layers")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_dropout", 1.0),
        ("lora_dropout", -0.1),
        ("lora_dropout", "0.1"),
        ("lora_dropout", float("nan")),
        ("use_rslora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern['q_proj']", {"q_proj": 0}),
        ("rank_pattern['q_proj']", {"q_proj": 2.5}),
        ("alpha_pattern['q_proj']", {"q_proj": "x"}),
        ("exclude_modules", [1]),
        ("layers_to_transform", ["0"]),
        ("layers_to_transform", True),
        ("layers_pattern", 3),
    ],
)
def test_wrong_options_name_the_field(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as error:
        spec_from_peft({"target_modules": ["q_proj"], name.partition("[")[0]: value})
    assert error.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers_pattern", []),
        ("layers_to_transform", []),
        ("lora_dropout", 0),
        ("megatron_core", None),
        ("modules_to_save", []),
        ("peft_version", "0.1.0"),
        ("qalora_group_size", 32),
        ("rank_pattern", None),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("task_type", None),
        ("field_of_tomorrow", None),
        ("field_of_tomorrow", False),
        ("field_of_tomorrow", {}),
    ],
)
def test_accepts_what_changes_nothing(name: str, value: object) -> None:
    assert spec_from_peft({"target_modules": "all-linear", name: value}).target_modules == "all-linear"


@pytest.mark.filterwarnings("error")
def test_peft_reads_what_we_write(tmp_path: Path) -> None:
    written = peft_config(LoraSpec(rank=16, alpha=32.0, seed=1), ["v_proj", "q_proj", "v_proj"], "org/model")
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    config = peft.PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(config, peft.LoraConfig)
    assert (config.r, config.lora_alpha, config.target_modules) == (16, 32, {"q_proj", "v_proj"})
    assert (config.peft_type, config.task_type, config.inference_mode) == ("LORA", "CAUSAL_LM", True)
    assert config.base_model_name_or_path == "org/model"
    expected = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    expected.inference_mode, expected.base_model_name_or_path = True, "org/model"
    assert config.to_dict() == expected.to_dict()


def test_what_we_write_is_sorted_and_plain() -> None:
    written = peft_config(LoraSpec(rank=8, alpha=12.5), ["v_proj", "q_proj"], "m")
    assert written["target_modules"] == ["q_proj", "v_proj"]
    assert written["lora_alpha"] == 12.5
    assert type(peft_config(LoraSpec(rank=8), ["q_proj"], "m")["lora_alpha"]) is int
    assert list(written) == sorted(written)


def test_we_read_what_we_write() -> None:
    spec = LoraSpec(rank=8, alpha=12.5, target_modules=("q_proj", "v_proj"))
    assert spec_from_peft(peft_config(spec, ["v_proj", "q_proj"], "m")) == spec
