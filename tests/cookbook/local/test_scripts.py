"""Every local script runs to its end, a step or two on a small random model. What the scripts learn is in docs."""

import json
import runpy
import shutil
import sys

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.paths import ROOT
from twinkle import hub
from twinkle.advantage import GAEAdvantage, GRPOAdvantage

COOKBOOK = ROOT / "cookbook"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A folder with a tiny model's weights; the scripts also load it with plain Transformers."""
    shape, folder = hub.resolve("random://llama-tiny").path, tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shape)
    # Even smaller: bf16 products are slow on CPUs without instructions for them.
    config.update({"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shape).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(tiny, monkeypatch):
    """``run(script, *arguments)`` runs a script and returns its global names."""
    monkeypatch.setenv("TWINKLE_MODEL", tiny)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(script: str, *arguments: object) -> dict:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        return runpy.run_path(str(COOKBOOK / script), run_name="__main__")

    yield run
    torch.set_num_threads(threads)


def test_sft_lora(run, tmp_path, capsys):
    names = run("transformers/sft_lora.py", "--epochs", 2, "--batch-size", 24, "--output", tmp_path)
    assert float(names["metrics"]["loss"]) < 6.3  # it starts at ln 512 = 6.24, because a random model knows nothing
    assert peft.PeftConfig.from_pretrained(tmp_path / "sft_lora").r == 16
    assert "after, from" in capsys.readouterr().out


def test_precision_reaches_the_plain_model_too(run, tmp_path, tiny):
    """The weights in the folder are bf16, and Transformers alone would load them like that."""
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    AutoModelForCausalLM.from_pretrained(tiny).bfloat16().save_pretrained(folder)
    small = ("--model", folder, "--epochs", 1, "--batch-size", 48, "--output", tmp_path)
    assert run("transformers/sft_lora.py", *small, "--precision", "fp32")["base"].dtype == torch.float32


def test_sft_full(run, tmp_path, tiny):
    run("transformers/sft_full.py", "--epochs", 1, "--batch-size", 24, "--output", tmp_path)
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny, tmp_path / "sft_full"))
    moved = {name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= moved


@pytest.mark.parametrize("name", ["fsdp2", "sp_fsdp_dense"])
def test_scripts_for_several_processes_run_in_one(run, tmp_path, name):
    names = run(f"transformers/{name}.py", "--epochs", 1, "--batch-size", 24, "--output", tmp_path)
    assert len(names["losses"]) == 2
    assert names["world"] == 1
    assert peft.PeftConfig.from_pretrained(tmp_path / name).r == 16


def test_multi_lora(run, tmp_path):
    names = run("transformers/multi_lora.py", "--epochs", 1, "--batch-size", 20, "--output", tmp_path)
    assert names["losses"].keys() == {"identity", "pirate"}
    ranks = {name: peft.PeftConfig.from_pretrained(tmp_path / f"multi_lora_{name}").r for name in names["losses"]}
    assert ranks == {"identity": 16, "pirate": 8}


def test_dpo_raises_margins(run, tmp_path):
    run("transformers/dpo.py", "--epochs", 1, "--batch-size", 12, "--output", tmp_path, "--curve", tmp_path / "c.json")
    curves = json.loads((tmp_path / "c.json").read_text())
    margins = [margin for margin, _ in curves["train"]]
    assert margins[0] == 0  # at the start the adapter equals the reference
    assert margins[-1] > 0
    assert len(curves["held_out"]) == 1


def test_grpo(run, tmp_path, monkeypatch):
    """A random model never adds correctly, so its answers get advantages by their position in the batch."""
    monkeypatch.setattr(
        GRPOAdvantage, "__call__", lambda _, rewards, num_generations: torch.linspace(-1, 1, len(rewards))
    )
    names = run("rl/grpo.py", "--steps", 2, "--prompts", 2, "--samples", 4, "--curve", tmp_path / "c.json")
    assert len(names["useful"]) == 8
    assert names["metrics"]["train/approx_kl"] < 0.01
    assert names["metrics"]["iters"] == 1
    assert json.loads((tmp_path / "c.json").read_text())["reward"] == [0.0, 0.0]


SMALL = ("--steps", 2, "--prompts", 2, "--samples", 4, "--test", 3, "--precision", "fp32")


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.get_state_dict().items()}


def test_grpo_full(run, tmp_path, monkeypatch, tiny):
    monkeypatch.setattr(
        GRPOAdvantage, "__call__", lambda _, rewards, num_generations: torch.linspace(-1, 1, len(rewards))
    )
    names = run("rl/grpo_full.py", *SMALL, "--curve", tmp_path / "c.json")
    assert len(names["useful"]) == 8
    assert names["metrics"]["train/approx_kl"] < 1e-6  # the sampler has the trainer's weights, in fp32
    assert json.loads((tmp_path / "c.json").read_text()) == {"reward": [0.0, 0.0], "accuracy": [0.0, 0.0]}
    before = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in weights(names["model"]).items())


@pytest.mark.parametrize("script", ["rl/ppo.py", "rl/ppo_full.py", "rl/ppo/ppo.py"])
def test_ppo(run, tmp_path, monkeypatch, script):
    """A random model never adds correctly, so every second answer is rewarded."""
    monkeypatch.setattr(
        GAEAdvantage,
        "build_token_rewards",
        lambda _, rewards, lengths, **price: [[0.0] * (n - 1) + [float(i % 2)] for i, n in enumerate(lengths)],
    )
    kl = () if "full" in script else ("--kl-coef", 0.1)
    names = run(script, *SMALL, *kl, "--critic-learning-rate", 1e-3, "--curve", tmp_path / "c.json")
    curves = json.loads((tmp_path / "c.json").read_text())
    assert curves["reward"] == curves["accuracy"] == [0.0, 0.0]
    assert len(curves["explained_variance"]) == 2
    if script == "rl/ppo/ppo.py":  # the path of an older document, which runs the first script
        return
    assert names["metrics"]["iters"] == 7  # two steps, two epochs, two mini-batches
    assert [len(row) for row in names["advantages"]] == names["lengths"]
    assert names["critic"].model.get_output_embeddings().weight.any()
    full = script == "rl/ppo_full.py"
    assert set(names["policy"].optimizer_group) == ({""} if full else {"adder"})


def test_the_recipes_have_the_same_held_out_sums(run):
    """For one seed, and none of them is trained on: also not when all sums for training have been used."""
    few, found = ("--steps", 0, "--test", 5, "--seed", 3, "--precision", "fp32"), []
    for script in ("rl/grpo.py", "rl/grpo_full.py", "rl/ppo.py", "rl/ppo_full.py"):
        names = run(script, *few)
        train = [names["addition"](a, b)["messages"] for a, b in names["train"]]
        test = [prompt["messages"] for prompt in names["test"]]
        assert (len(test), len(train)) == (5, 8095)
        assert not [prompt for prompt in test if prompt in train]
        found.append((test, train))
    assert all(each == found[0] for each in found)
    assert [prompt["messages"] for prompt in run("rl/grpo_full.py", *few, "--seed", 4)["test"]] != found[0][0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--prompts", 0), "--prompts: got 0, allowed: 1 or more"),
        (("--steps", -1), "--steps: got -1, allowed: 0 or more"),
        (("--test", 8001), "--test: got 8001, allowed: at most 8000"),
        (("--mini-batches", 0), "--mini-batches: got 0, allowed: 1 or more"),
        (("--prompts", 1, "--samples", 2, "--mini-batches", 3), "--mini-batches: got 3, allowed: at most one for each"),
    ],
)
@pytest.mark.parametrize("script", ["grpo", "grpo_full", "ppo", "ppo_full"])
def test_wrong_numbers_are_named(run, capsys, script, arguments, text):
    with pytest.raises(SystemExit):
        run(f"rl/{script}.py", *arguments)
    unknown = "grpo" in script and "--mini-batches" in arguments
    assert ("unrecognized arguments: --mini-batches" if unknown else text) in capsys.readouterr().err


def test_reward_of_addition(run):
    names = run("rl/grpo.py", "--steps", 0)
    trajectory = names["addition"](52, 34)
    for text, expected in [(" 86\n", 1.0), (" 86", 1.0), (" 68\n", 0.0), (" 86.", 0.0), ("", 0.0), (" 8 6\n", 0.0)]:
        completed = {**trajectory, "messages": [*trajectory["messages"], {"role": "assistant", "content": text}]}
        assert names["RightAnswer"]()([completed]) == [expected]
