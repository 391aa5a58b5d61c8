"""The scripts with pictures run a few steps on a tiny model that sees. What they learn is in docs/images.md."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cookbook.client.client_cookbook import CLIENT, SEEING_MODEL
from twinkle_client import default_client

Run = Callable[..., dict[str, Any]]
SMALL = ("--rows", 8, "--test", 8, "--epochs", 2, "--batch-size", 4, "--seed", 3)


@pytest.fixture(autouse=True)
def _seeing_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_MODEL", SEEING_MODEL)


def test_tinker(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("tinker/self_host/multi_modal.py", *SMALL, "--curve", tmp_path / "c.json")
    curves = json.loads((tmp_path / "c.json").read_text())
    assert len(curves["loss"]) == 4
    assert curves["loss"][-1] < curves["loss"][0]
    assert curves["accuracy"] == [names["before"], names["after"]]
    assert names["before"] == 0.25  # two pictures of each colour: a model that knows nothing says the same to all
    before, image, after = names["data"][0].model_input.chunks
    assert (image.expected_tokens, image.format) == (16, "png")  # 128 × 128 pixels, 32 × 32 a token
    assert names["tokenizer"].decode([before.tokens[-1], after.tokens[0]]) == "<|vision_start|><|vision_end|>"
    printed = capsys.readouterr().out
    assert len(re.findall(r"^  a picture of '\w+': '", printed, re.MULTILINE)) == 16
    assert re.search(r"^saved tinker://\S+/weights/multi-modal$", printed, re.MULTILINE)


def test_twinkle_is_the_same_here_and_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With local imports, and the server's precision, the script prints the same numbers and the same answers."""
    script = CLIENT / "twinkle/self_host/multi_modal.py"
    monkeypatch.chdir(tmp_path)
    there = run("twinkle/self_host/multi_modal.py", *SMALL)
    default_client().close()  # a script leaves that to the end of its process
    printed_there = capsys.readouterr().out
    text = script.read_text().replace("from twinkle_client", "from twinkle")
    text = text.replace("(model_id=MODEL)", '(model_id=MODEL, mixed_precision="fp32")')
    here: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    exec(compile(text, str(script), "exec"), here)
    printed_here = capsys.readouterr().out

    assert len(there["losses"]) == 4
    assert there["losses"][-1] < there["losses"][0]
    assert here["losses"] == pytest.approx(there["losses"], abs=1e-4)
    assert (here["before"], here["after"]) == (there["before"], there["after"])
    assert there["before"] == 0.25
    assert answers(printed_here) == answers(printed_there)
    assert len(answers(printed_there)) == 16
    assert re.search(r"^saved twinkle://session_\w+-eyes/weights/multi-modal$", printed_there, re.MULTILINE)


def answers(printed: str) -> list[str]:
    return re.findall(r"^  a picture of .*$", printed, re.MULTILINE)


@pytest.mark.parametrize("protocol", ["tinker", "twinkle"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--rows", 0), "--rows: got 0, allowed: 1 or more"),
        (("--test", 3), "--test: the 3 pictures have 3 different texts, needed: 4 to choose from"),
    ],
)
def test_wrong_numbers_are_named(
    run: Run, capsys: pytest.CaptureFixture[str], protocol: str, arguments: tuple[str, int], text: str
) -> None:
    with pytest.raises(SystemExit):
        run(f"{protocol}/self_host/multi_modal.py", *arguments)
    assert text in capsys.readouterr().err
