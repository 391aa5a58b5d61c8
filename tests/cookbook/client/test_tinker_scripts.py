"""The scripts of cookbook/client/tinker run a step or two on a small random model. What they learn is in docs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.cookbook.client.client_cookbook import CLIENT, MODEL, is_real, without_data
from tests.cookbook.client.word_problems import often_right, write_word_problems
from tests.support.servers.running import Server

Run = Callable[..., dict[str, Any]]
SELF_HOST = "tinker/self_host"


def test_dpo_raises_margins(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"{SELF_HOST}/dpo.py", "--epochs", 2, "--batch-size", 24, "--curve", tmp_path / "c.json")
    curves = json.loads((tmp_path / "c.json").read_text())
    margins = [margin for margin, _ in curves["train"]]
    assert margins[0] == pytest.approx(0, abs=1e-5)  # at the start the adapter equals the reference
    assert margins[-1] > margins[1] > 0
    assert curves["held_out"][1][0] > 0
    printed = capsys.readouterr().out
    assert re.search(r"^epoch 2: held-out margin \d\.\d\d, accuracy \d+%$", printed, re.MULTILINE)
    assert re.search(r"^saved tinker://\S+/weights/dpo$", printed, re.MULTILINE)


def test_grpo_learns_from_word_problems(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    get_tokenizer = tinker.TrainingClient.get_tokenizer
    monkeypatch.setattr(tinker.TrainingClient, "get_tokenizer", lambda self: often_right(get_tokenizer(self)))
    data = write_word_problems(tmp_path / "gsm8k")
    small = ("--steps", 2, "--prompts", 2, "--samples", 8, "--test", 4, "--max-tokens", 6)
    names = run(f"{SELF_HOST}/short_math_grpo.py", "--data", data, *small, "--curve", tmp_path / "c.json")
    assert 0 < len(names["scored"]) <= 16
    assert sum(advantage for _, _, advantage in names["scored"]) == pytest.approx(0, abs=1e-5)
    assert all(0 < reward < 1 for reward in json.loads((tmp_path / "c.json").read_text())["reward"])
    assert re.search(r"^saved tinker://\S+/weights/grpo$", capsys.readouterr().out, re.MULTILINE)


def test_rewards_of_word_problems(run: Run, tmp_path: Path) -> None:
    data = write_word_problems(tmp_path / "gsm8k")
    small = ("--steps", 1, "--prompts", 1, "--samples", 2, "--test", 1, "--max-tokens", 2)
    is_right = run(f"{SELF_HOST}/short_math_grpo.py", "--data", data, *small)["is_right"]
    for text in (r"so \boxed{1,200}.", r"\boxed{3}, no: \boxed{ 1200 }", r"\boxed{\$1200}", r"\boxed{1200.0}"):
        assert is_right(text, 1200.0)
    for text in ("1200", r"\boxed{120}", r"\boxed{1200}, no: \boxed{3}", r"\boxed{}", r"\boxed{many}", ""):
        assert not is_right(text, 1200.0)


def test_rewards_of_sums(run: Run) -> None:
    names = run(f"{SELF_HOST}/short_math_grpo.py", "--data", "sums", "--steps", 1, "--prompts", 1, "--test", 1)
    assert len(names["curve"]) == 1
    for text, expected in [(" 86\n", True), (" 86", True), (" 68\n", False), (" 86.", False), ("", False)]:
        assert names["is_right"](text, 86.0) is expected


def test_modelscope_variants_are_one_file() -> None:
    """The variants differ only in the name of the script that they run, which is also their own name, and in data."""
    own = {script.name for script in (CLIENT / SELF_HOST).glob("*.py") if is_real(script)} - {"demo.py"}
    variants = {
        script.name: script.read_text() for script in (CLIENT / "tinker/modelscope").glob("*.py") if is_real(script)
    }
    assert variants.keys() == own
    assert len({without_data(text).replace(name, "NAME") for name, text in variants.items()}) == 1


@pytest.mark.thorough
def test_modelscope_variant(server: Server, tmp_path: Path) -> None:
    """Runs in a separate process, because it modifies the SDK. The SDK alone would not accept this key."""
    names = {"TWINKLE_SERVER_URL": server.url, "MODELSCOPE_TOKEN": "ms-0123", "TWINKLE_MODEL": MODEL}
    script = CLIENT / "tinker/modelscope/lora.py"
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, **names}, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Twinkle, twinkle, little|" in done.stdout
