"""The scripts of cookbook/client/tinker/self_host, run as a user runs them."""

import re
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import environment
from tests.support.servers.serving import MODEL, Server

SCRIPTS = ROOT / "cookbook" / "client" / "tinker" / "self_host"


def run(script: str, server: Server, directory: Path) -> str:
    """Run a script, which must succeed without a complaint, and return its output."""
    names = {"TWINKLE_SERVER_URL": server.url, "TWINKLE_SERVER_TOKEN": f"tml-{script}", "TWINKLE_MODEL": MODEL}
    done = run_forked([SCRIPTS / f"{script}.py"], {**environment(), **names}, directory)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", printed, re.MULTILINE)]


def test_lora(server: Server, tmp_path: Path) -> None:
    printed = run("lora", server, tmp_path)
    found = losses(printed)
    assert len(found) == 10
    assert found == sorted(found, reverse=True)  # the second client continues where the first one saved
    assert re.search(r"^saved tinker://\S+/weights/halfway$", printed, re.MULTILINE)
    assert "Twinkle, twinkle, little|" in printed


def test_sample(server: Server, tmp_path: Path) -> None:
    printed = run("sample", server, tmp_path)
    assert "same again: True" in printed
    assert len(re.findall(r"\((stop|length), mean logprob -\d", printed)) == 1 + 4 + 2 + 3 + 1 + 3
    tokens = len("The quick brown fox jumps over the lazy banana")  # this tokenizer has one token per byte
    assert len(re.findall(r"-\d+\.\d\d   likeliest: ", printed)) == tokens - 1


def test_self_cognition(server: Server, tmp_path: Path) -> None:
    printed = run("self_cognition", server, tmp_path)
    found = losses(printed)
    assert len(found) == 36
    assert sum(found[-6:]) < sum(found[:6])
    assert re.search(r"^resume from tinker://\S+/weights/self-cognition$", printed, re.MULTILINE)
    assert re.search(r"^sample with tinker://\S+/sampler_weights/self-cognition$", printed, re.MULTILINE)
