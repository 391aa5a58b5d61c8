"""The scripts of cookbook/client/twinkle run a step or two on a small random model. What they learn is in docs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cookbook.client.client_cookbook import CLIENT, MODEL, is_real, without_data
from tests.cookbook.client.word_problems import ANSWER, write_word_problems
from twinkle_client import LoraConfig, default_client, init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

Run = Callable[..., dict[str, Any]]
SELF_HOST = "twinkle/self_host"


def test_self_cognition_is_the_same_here_and_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With local imports, and the server's precision, the script prints the same numbers and the same answers."""
    small = ("--epochs", 2, "--batch-size", 24)
    script = CLIENT / SELF_HOST / "self_cognition.py"
    monkeypatch.chdir(tmp_path)

    there = run(f"{SELF_HOST}/self_cognition.py", *small)["losses"]
    default_client().close()  # a script leaves that to the end of its process
    printed_there = capsys.readouterr().out
    text = script.read_text().replace("from twinkle_client", "from twinkle")
    assert text.count("from twinkle") == 6
    text = text.replace("(model_id=MODEL)", '(model_id=MODEL, mixed_precision="fp32")')
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    exec(compile(text, str(script), "exec"), names)
    printed_here = capsys.readouterr().out

    assert names["losses"] == pytest.approx(there, abs=1e-4)
    assert there[-1] < there[0]
    assert re.search(r"^saved twinkle://session_\w+-identity/weights/self-cognition$", printed_there, re.MULTILINE)
    assert "\nsaved output/self-cognition\n" in printed_here
    assert _answers(printed_there) == _answers(printed_here)


def _answers(printed: str) -> str:
    """Return all answers from before and after training."""
    return re.sub(r"^epoch .*\n", "", printed[printed.index("before:") : printed.index("saved")], flags=re.MULTILINE)


@pytest.mark.thorough
def test_dpo_raises_margins(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"{SELF_HOST}/dpo.py", "--epochs", 2, "--batch-size", 24, "--curve", tmp_path / "c.json")
    curves = json.loads((tmp_path / "c.json").read_text())
    margins = [margin for margin, _ in curves["train"]]
    assert margins[0] == 0  # at the start the adapter equals the reference
    assert margins[-1] > margins[1] >= 0
    assert curves["held_out"][1][0] > 0
    printed = capsys.readouterr().out
    assert re.search(r"^epoch 2: held-out margin \d\.\d\d, accuracy \d+%$", printed, re.MULTILINE)
    assert re.search(r"^saved twinkle://\S+/weights/dpo$", printed, re.MULTILINE)


def test_grpo_learns_from_its_samples(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random model never adds correctly, so here every answer that begins with an even token counts as correct."""
    sample = Sampler.sample

    def sometimes_right(self: Sampler, *arguments: Any, **keywords: Any) -> list:
        responses = sample(self, *arguments, **keywords)
        for sequence in (sequence for response in responses for sequence in response.sequences):
            if sequence.tokens[0] % 2 == 0:
                sequence.new_input_feature["messages"][-1]["content"] = rf"So \boxed{{{ANSWER}}}"
        return responses

    monkeypatch.setattr(Sampler, "sample", sometimes_right)
    data = write_word_problems(tmp_path / "gsm8k") / "train.jsonl"
    small = ("--steps", 2, "--prompts", 2, "--samples", 8, "--test", 4, "--max-tokens", 6)
    names = run(f"{SELF_HOST}/short_math_grpo.py", "--data", data, *small, "--curve", tmp_path / "c.json")
    assert 0 < len(names["useful"]) <= 16
    assert sum(advantage for _, advantage in names["useful"]) == pytest.approx(0, abs=1e-5)
    assert all(0 < reward < 1 for reward in json.loads((tmp_path / "c.json").read_text())["reward"])
    assert 0 <= names["kl"] < 1e-3  # sampler and trainer are the same policy
    assert re.search(r"^saved twinkle://\S+/weights/grpo$", capsys.readouterr().out, re.MULTILINE)


def test_rewards_of_sums(run: Run) -> None:
    names = run(f"{SELF_HOST}/short_math_grpo.py", "--data", "sums", "--steps", 1, "--prompts", 1, "--test", 1)
    assert len(names["curve"]) == 1
    for text, expected in [(" 86\n", True), (" 86", True), (" 68\n", False), (" 86.", False), ("", False)]:
        assert names["is_right"](text, 86.0) is expected


def test_sample(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with init_twinkle_client():
        model = MultiLoraTransformersModel(MODEL)
        model.add_adapter_to_model("some", LoraConfig())
        address = model.save("some-day")
    run(f"{SELF_HOST}/sample.py")
    printed = capsys.readouterr().out
    assert "same again: True" in printed
    assert len(re.findall(r"\((stop|length), mean logprob -\d", printed)) == 1 + 4 + 2 + 3 + 1 + 3
    assert len(re.findall(r"log-probability -\d+\.\d\d, question included", printed)) == 2
    assert f"  {address}  (" in printed  # a checkpoint of a session that has ended
    run(f"{SELF_HOST}/sample.py", address)
    assert f"the same model with {address}\n  '" in capsys.readouterr().out


def test_modelscope_variants_are_one_file() -> None:
    """The variants differ only in the name of the script that they run, which is also their own name, and in data."""
    own = {script.name for script in (CLIENT / SELF_HOST).glob("*.py") if is_real(script)}
    variants = {
        script.name: script.read_text() for script in (CLIENT / "twinkle/modelscope").glob("*.py") if is_real(script)
    }
    assert variants.keys() == own
    assert len({without_data(text).replace(name, "NAME") for name, text in variants.items()}) == 1


def test_modelscope_variant(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MODELSCOPE_TOKEN", "ms-0123")
    run("twinkle/modelscope/sample.py")
    assert "same again: True" in capsys.readouterr().out
