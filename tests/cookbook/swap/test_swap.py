"""Every local script computes the same on a server after ``twinkle`` was replaced by ``twinkle_client`` in it."""

import json

import peft
import pytest
from safetensors.torch import load_file

CONNECTION = 'from twinkle_client import init_twinkle_client\ninit_twinkle_client("{url}", "tml-swap")\n'
FP32 = ("--precision", "fp32")


def assert_same_numbers(server, local) -> None:
    assert len(server.losses) == len(local.losses) > 0
    for value, expected in zip(server.losses, local.losses, strict=True):
        assert abs(value - expected) <= 1e-5 * max(1, abs(expected))
    assert len(set(local.losses)) > 1
    assert [tokens for tokens, _ in server.samples] == [tokens for tokens, _ in local.samples]
    for (_, values), (_, expected) in zip(server.samples, local.samples, strict=True):
        assert values == pytest.approx(expected, abs=1e-5)


def curve(record):
    return json.loads((record.folder / "curve.json").read_text())


def answers(output: str) -> list[str]:
    """Return the lines with a question and its answer, of which a random model may give several lines."""
    found = [line for line in output.splitlines() if "?  " in line]
    assert found
    return found


def assert_same_weights(server, local, name: str, file: str = "adapter_model.safetensors") -> None:
    found, wanted = (load_file(each.folder / name / file) for each in (server, local))
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (found[key] - tensor).norm() <= 1e-4 * tensor.norm(), key


def test_sft_lora(run, capsys):
    arguments = ("transformers/sft_lora.py", "--epochs", 1, "--batch-size", 16, *FP32)
    local = run(*arguments)
    said = answers(capsys.readouterr().out)
    server = run(*arguments, connection=CONNECTION)
    assert_same_numbers(server, local)
    assert curve(server) == pytest.approx(curve(local), abs=1.5e-4)  # rounded to four digits
    assert_same_weights(server, local, "sft_lora")
    saved = server.names["saved"]
    assert saved == str(server.folder / "sft_lora")
    assert saved.twinkle_path.startswith("twinkle://")
    assert peft.PeftConfig.from_pretrained(saved).r == 16
    assert answers(capsys.readouterr().out) == said  # greedy, before and after, with Transformers and PEFT
    assert server.names["metrics"].keys() == local.names["metrics"].keys()


@pytest.mark.thorough
def test_sft_full(run, full_model, monkeypatch, capsys):
    """The script adds no adapter: on a model with train_mode: full its first verb begins a run of all parameters."""
    monkeypatch.setenv("TWINKLE_MODEL", full_model)
    arguments = ("transformers/sft_full.py", "--epochs", 1, "--batch-size", 16, *FP32)
    local = run(*arguments)
    said = answers(capsys.readouterr().out)
    server = run(*arguments, connection=CONNECTION)
    assert_same_numbers(server, local)
    assert curve(server) == pytest.approx(curve(local), abs=1.5e-4)  # rounded to four digits
    assert_same_weights(server, local, "sft_full", "model.safetensors")
    assert server.names["saved"] == str(server.folder / "sft_full")
    assert answers(capsys.readouterr().out) == said  # greedy, before and after, with Transformers
    assert server.names["metrics"].keys() == local.names["metrics"].keys()


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["fsdp2", "sp_fsdp_dense"])
def test_meshes_are_left_to_the_server(run, script):
    arguments = (f"transformers/{script}.py", "--epochs", 1, "--batch-size", 16, *FP32)
    local, server = run(*arguments), run(*arguments, connection=CONNECTION)
    assert_same_numbers(server, local)
    assert curve(server) == pytest.approx(curve(local), abs=1.5e-4)
    assert_same_weights(server, local, script)


@pytest.mark.thorough
def test_multi_lora(run, session):
    arguments = ("transformers/multi_lora.py", "--epochs", 1, "--batch-size", 16, *FP32)
    local, server = run(*arguments), run(*arguments, connection="", client=session)
    assert_same_numbers(server, local)
    assert curve(server) == [pytest.approx(losses, abs=1.5e-4) for losses in curve(local)]
    for name in ("multi_lora_identity", "multi_lora_pirate"):
        assert_same_weights(server, local, name)


@pytest.mark.thorough
def test_dpo(run, session):
    arguments = ("transformers/dpo.py", "--epochs", 1, "--batch-size", 24, *FP32)
    local, server = run(*arguments), run(*arguments, connection="", client=session)
    assert_same_numbers(server, local)
    for part in ("train", "held_out"):
        assert curve(server)[part] == [pytest.approx(pair, abs=1.5e-4) for pair in curve(local)[part]]
    assert_same_weights(server, local, "dpo")


def test_grpo(run, session):
    arguments = ("rl/grpo.py", "--steps", 2, "--prompts", 3, "--samples", 4, *FP32)
    local, server = run(*arguments), run(*arguments, connection="", client=session)
    assert_same_numbers(server, local)
    assert any(logprobs for _, logprobs in local.samples)
    assert curve(server) == curve(local)


def test_self_cognition_with_a_variable_instead_of_lines(run, model, server, monkeypatch, capsys):
    """It drives a Trainer itself, two adapters in each pass, and does not call initialize."""
    monkeypatch.setenv("TWINKLE_SERVER_URL", server.url)
    arguments = ("local/self_cognition.py", "--model", model, "--steps", 3, "--batch-size", 4, *FP32)
    local = run(*arguments)
    said = answers(capsys.readouterr().out)
    served = run(*arguments, connection="")
    assert_same_numbers(served, local)
    assert len(served.losses) == 6
    assert answers(capsys.readouterr().out) == said  # greedy, with the files that the trainer saved
    for found, expected in zip(served.names["results"], local.names["results"], strict=True):
        assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], abs=1e-5)
        for values, wanted in zip(found.logprobs, expected.logprobs, strict=True):
            assert values.shape == wanted.shape
            assert abs(values - wanted).max() <= 1e-5 * abs(wanted).max()
