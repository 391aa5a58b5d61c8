"""CLI.from_args: which source takes precedence, how text is converted, and what is refused."""

import dataclasses

import pytest

from twinkle.cli import CLI, Args, CLISource, ConfigRegistry, ConfigResolver, DotEnvSource, ValueCaster, YamlSource
from twinkle.errors import InvalidInputError


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch, tmp_path):
    import os

    for name in list(os.environ):
        if name.startswith("TWINKLE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_defaults():
    args = CLI.from_args([])
    assert args == Args()
    assert (args.training.batch_size, args.optimizer.learning_rate, args.lora.lora_r) == (8, 1e-5, 8)
    assert (args.sampling.seed, args.training.seed, args.infra.mode, args.extra) == (None, 42, "local", {})


def test_later_sources_win(monkeypatch, tmp_path):
    (tmp_path / ".env").write_text(
        "# settings\nexport TWINKLE_LR=1\nbatch_size=1\nMAX_STEPS='1'\nSAVE_STEPS=1 # often\nTOKEN=x\n"
    )
    (tmp_path / ".env.local").write_text("log_interval=1\n")
    monkeypatch.setenv("TWINKLE_BATCH_SIZE", "2")
    monkeypatch.setenv("TWINKLE_MAX_STEPS", "2")
    monkeypatch.setenv("TWINKLE_SERVER_TOKEN", "secret")
    monkeypatch.setenv("PORT", "2")
    (tmp_path / "run.yaml").write_text("training:\n  max_steps: 3\noptimizer: {learning_rate: 3e-4}\nown: {key: [1]}\n")
    args = CLI.from_args(["--config", "run.yaml", "--lr", "4"])
    assert args.training.save_steps == 1
    assert args.training.log_interval == 10  # only one file is read: the first
    assert args.training.batch_size == 2
    assert args.training.max_steps == 3
    assert args.optimizer.learning_rate == 4.0
    assert args.server.port == 8000  # set by another program
    assert args.extra == {"own_key": [1]}  # and no secrets
    assert CLI.from_args([], config_file=tmp_path / "run.yaml").optimizer.learning_rate == 3e-4


def test_any_twinkle_variable_may_be_set(monkeypatch):
    for name, value in {
        "TRUST_REMOTE_CODE": "0",
        "FULL_DETERMINISM": "1",
        "SEED": "7",
        "MODE": "ray",
        "FAIL_FAST": "0",
        "MY_OWN": "a,2",
        "SERVER_TOKEN": "secret",
        "LLM_API_KEY": "secret",
        "NOTIFIER": '{"secret": 1}',
    }.items():
        monkeypatch.setenv(f"TWINKLE_{name}", value)
    args = CLI.from_args([])
    assert (args.model.trust_remote_code, args.training.full_determinism) == (False, True)
    assert (args.training.seed, args.infra.mode) == (7, "ray")
    assert args.extra == {"fail_fast": 0, "my_own": ["a", 2]}  # without secrets, because scripts log their options


def test_switches_take_1_and_0():
    words = ["--lazy-collect", "1", "--gradient-checkpointing", "0", "--use-lora", "ON", "--no-load-weights"]
    args = CLI.from_args(words)
    assert (args.infra.lazy_collect, args.model.gradient_checkpointing) == (True, False)
    assert (args.lora.use_lora, args.model.load_weights) == (True, False)
    assert CLI.from_args(["--lazy-collect=0"]).infra.lazy_collect is False


def test_own_options_are_found_as_they_are_written():
    args = CLI.from_args(["--no-fused-ce", "--my-flag", "3"])
    assert (args.get("fused-ce"), args["fused_ce"], args["my-flag"], args.get("my_flag")) == (False, False, 3, 3)
    assert args.model.enable_fused_ce is True
    with pytest.raises(KeyError, match="your-flag"):
        args["your-flag"]


def test_the_grammar_of_a_command_line():
    words = "train.py --key-one 1 --key_two=a=b --flag --no-x --no_y --list a,b -v --last"
    assert CLISource(words.split()).load() == {
        "key_one": "1",
        "key_two": "a=b",
        "flag": True,
        "x": False,
        "y": False,
        "list": "a,b",
        "last": True,
    }
    assert CLISource(["--lr", "-1"]).load() == {"lr": "-1"}


def test_texts_become_values_of_the_fields_type():
    words = (
        "--max-steps 5 --lr=1 --use-lora --no-lazy-collect --dataset_id 123 --revision=none --num-gpus 2 --mine 1.5 "
        "--lora-target-modules q_proj,v_proj --stop 3,4 --reward_fns=one --max_new_tokens 7 --word hello"
    )
    args = CLI.from_args(words.split())
    assert (args.training.max_steps, args.optimizer.learning_rate) == (5, 1.0)
    assert isinstance(args.optimizer.learning_rate, float)
    assert (args.lora.use_lora, args.infra.lazy_collect) == (True, False)
    assert (args.dataset.dataset_id, args.dataset.revision) == ("123", None)
    assert (args.lora.lora_target_modules, args.sampling.stop) == (["q_proj", "v_proj"], [3, 4])
    assert (args.rl.reward_fns, args.infra.nproc_per_node, args.sampling.max_tokens) == (["one"], 2, 7)
    assert args.extra == {"mine": 1.5, "word": "hello"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--batch-size", "many"], "batch_size: got 'many', allowed: an integer"),
        (["--batch-size", "2.5"], "batch_size: got 2.5, allowed: an integer"),
        (["--batch-size"], "batch_size: got True, allowed: an integer"),
        (["--lr", "fast"], "lr: got 'fast', allowed: a number"),
        (["--use-lora", "3"], "use_lora: got 3, allowed: true or false"),
        (["--ddp-config", "x"], "ddp_config: got 'x', allowed: a mapping"),
    ],
)
def test_values_that_do_not_fit_are_refused(words, text):
    with pytest.raises(InvalidInputError, match=text):
        CLI.from_args(words)


def test_names_that_two_groups_have():
    args = CLI.from_args(["--model-id", "m", "--seed", "1", "--sampling-seed", "2", "--training_max_steps", "3"])
    assert (args.model.model_id, args.template.model_id) == ("m", None)
    assert (args.training.seed, args.sampling.seed, args.training.max_steps) == (1, 2, 3)
    assert CLI.from_args(["--server-config", "s.yaml"]).server.config == "s.yaml"
    flat = args.to_dict()
    assert (flat["model_id"], flat["template_model_id"], flat["seed"], flat["sampling_seed"]) == ("m", None, 1, 2)


def test_groups_as_arguments():
    args = CLI.from_args(["--template-model-id", "t", "--lr", "2", "--lora-r", "4", "--t_max", "9"])
    assert args.get_model_args()["model_id"] == args.get_template_args()["model_id"] == "t"
    assert "model_cls" not in args.get_model_args()
    assert args.get_lora_args() == {"target_modules": "all-linear", "r": 4, "lora_alpha": 32, "lora_dropout": 0.05}
    assert args.get_optimizer_args()["lr"] == 2.0
    assert "learning_rate" not in args.get_optimizer_args()
    assert args.get_scheduler_args()["t_max"] == 9
    for name in args.groups:
        said = getattr(args, f"get_{name}_args")()
        assert isinstance(said, dict)
        assert None not in said.values()


def test_one_value():
    args = CLI.from_args(["--mine", "1"])
    assert (args.get("batch_size"), args["mine"], args.get("nothing", 3)) == (8, 1, 3)
    with pytest.raises(KeyError, match="nothing"):
        args["nothing"]


@pytest.mark.parametrize(("value", "strategy"), [("false", "native_fsdp"), ("true", "accelerate")])
def test_use_megatron_means_what_it_says(value, strategy):
    assert CLI.from_args(["--use-megatron", value]).model.strategy == strategy


def test_a_near_miss_is_told(monkeypatch):
    from twinkle.cli import resolver

    told = []
    monkeypatch.setattr(resolver.get_logger(), "warning", told.append)
    assert CLI.from_args(["--learning-rat", "1"]).extra == {"learning_rat": 1}
    assert "did you mean 'learning_rate'" in told[0]


def test_variables_without_the_prefix_are_told(monkeypatch):
    from twinkle.cli import resolver

    told = []
    monkeypatch.setattr(resolver.get_logger(), "warning", told.append)
    monkeypatch.setenv("LR", "0.5")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert CLI.from_args([]).optimizer.learning_rate != 0.5
    assert told == ["environment: LR not read as an option; set TWINKLE_LR instead"]


def test_maps_that_are_values_stay_whole(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(
        "home: /data\nmodel: {fsdp_config: {reshard_after_forward: true}}\ndataset_id: ${home}/rows\n"
    )
    args = CLI.from_args([], config_file="run.yaml")
    assert args.model.fsdp_config == {"reshard_after_forward": True}
    assert args.dataset.dataset_id == "/data/rows"
    assert YamlSource("run.yaml").load()["model_fsdp_config_reshard_after_forward"] is True
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(InvalidInputError, match="a mapping at its top"):
        CLI.from_args(["--config=list.yaml"])


@pytest.mark.parametrize("content", [b"a: [1\n", b"\xff\xfe", b"a: ${nowhere}\n"])
def test_files_that_are_no_yaml(tmp_path, content):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"config: got 'run\.yaml', allowed: a YAML file \("):
        CLI.from_args(["--config", "run.yaml"])
    with pytest.raises(InvalidInputError, match="config: got True, allowed: --config followed by the path"):
        CLI.from_args(["--config"])


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.yaml"):
        CLI.from_args(["--config", "no.yaml"])
    with pytest.raises(FileNotFoundError):
        DotEnvSource(tmp_path / "no.env").load()
    assert DotEnvSource().load() == {}


def test_the_registry_wants_one_owner_of_a_name():
    one = dataclasses.make_dataclass("One", [("x", int, 1)])
    with pytest.raises(ValueError, match="'x' is a field of a, b"):
        ConfigRegistry({"a": one, "b": one})
    registry = ConfigResolver(Args()).registry
    assert registry.resolve("LR") == ("optimizer", "learning_rate")
    assert registry.resolve("no-such") is None
    assert {"lr", "batch_size", "training_batch_size"} <= set(registry.all_keys())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Yes", True),
        ("off", False),
        ("~", None),
        ("3", 3),
        ("1e-3", 0.001),
        ("a,2,no", ["a", 2, False]),
        ("x y", "x y"),
    ],
)
def test_reading_a_text(text, value):
    assert ValueCaster.auto_cast(text) == value
