"""tinker-cookbook's builders read a download as it is, and their models compute what the server trained."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.cookbook.recipes.offline_pictures import write_vision_model
from tests.support.models.base_folders import write_base_folder
from tests.support.paths import ROOT
from tests.support.servers.running import Server, environment
from tests.support.servers.serving import key_of, logprobs_of, sequences, tinker_data, worst_difference

pytestmark = [pytest.mark.cookbook, pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")]

PYTHON = ROOT / ".venv-cookbook" / "bin" / "python"
BASES = ("untied", "tied")
SEES = "seeing"

DOWNLOAD = """
import sys
from tinker_cookbook import weights
weights.download(tinker_path=sys.argv[1], output_dir=sys.argv[2])
"""
BUILD = """
import json, sys
from tinker_cookbook import weights
builder, options = getattr(weights, sys.argv[1]), json.loads(sys.argv[2])
builder(**options)
"""


def run(program: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the cookbook's environment."""
    kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    command = [str(PYTHON), "-c", program, *arguments]
    return subprocess.run(
        command, env={**kept, "HF_HUB_OFFLINE": "1", **settings}, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model whose head is tied to its embeddings, of one whose head is not, and of a vision model."""
    if not PYTHON.exists():
        pytest.skip("the cookbook is not installed; `make test-cookbook` does that")
    directory = tmp_path_factory.mktemp("builders")
    applications: list[dict[str, Any]] = [{"name": "server", "import_path": "server"}]
    folders = {name: write_base_folder(directory / name, tied=name == "tied") for name in BASES}
    for name, folder in {**folders, SEES: write_vision_model(directory / SEES)}.items():
        args = {"model_id": str(folder), "backend": "transformers", "device": "cpu", "dtype": "fp32"}
        applications.append({"name": name, "import_path": "model", "args": args})
    running = Server(directory, {"applications": applications}).start()
    yield running
    assert running.stop() == 0


class Trained:
    """An adapter with a trained head that the cookbook has downloaded, and the trainer's log-probabilities."""

    def __init__(self, server: Server, base: str, folder: Path) -> None:
        self.base = server.directory / base
        self.folder = folder
        service = tinker.ServiceClient(base_url=server.url, api_key=key_of("builders"))
        training = service.create_lora_training_client(base_model=base, rank=4, seed=3)
        for seed in (1, 2):
            training.forward_backward(tinker_data(sequences(seed)), "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        self.rows = sequences(50)
        self.expected = logprobs_of(training.forward(tinker_data(self.rows), "cross_entropy").result())
        path = training.save_weights_external(base).result().path
        done = run(DOWNLOAD, path, str(folder), TINKER_BASE_URL=server.url, TINKER_API_KEY=key_of("builders"))
        assert done.returncode == 0, done.stderr

    def build(self, builder: str, output: Path, base: Path | None = None) -> str:
        """Run one of the cookbook's builders; return "" or the last line of its error."""
        options = {"base_model": str(base or self.base), "adapter_path": str(self.folder), "output_path": str(output)}
        done = run(BUILD, builder, json.dumps(options))
        return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]

    def difference(self, model: Any) -> float:
        """Return the largest difference between the trainer's log-probabilities and the model's."""
        return worst_difference(model, self.rows, self.expected)


@pytest.mark.parametrize("base", BASES)
def test_builders_compute_what_was_trained(server: Server, base: str, tmp_path: Path) -> None:
    """Merging needs an untied base model, because in a tied one the head is also the input embedding."""
    trained = Trained(server, base, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(trained.base)
    assert trained.difference(plain) > 1e-2
    assert trained.build("build_lora_adapter", tmp_path / "lora") == ""
    assert trained.difference(PeftModel.from_pretrained(plain, tmp_path / "lora")) < 1e-4
    said = trained.build("build_hf_model", tmp_path / "merged")
    if base == "tied":
        assert "'lm_head.weight' which does not exist in the model state dict" in said
        untied = AutoModelForCausalLM.from_pretrained(trained.base)
        untied.config.tie_word_embeddings = False
        untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
        folder = write_base_folder(tmp_path / "untied", tied=False)
        untied.save_pretrained(folder)
        said = trained.build("build_hf_model", tmp_path / "merged", folder)
    assert said == ""
    assert trained.difference(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) < 1e-4


def test_builders_of_a_vision_model_compute_what_was_trained(server: Server, tmp_path: Path) -> None:
    """A download has Tinker's names; the builders add the name of the decoder. Qwen3.5 also has a class for text."""
    trained = Trained(server, SEES, tmp_path / "adapter")
    text = AutoModelForCausalLM.from_pretrained(trained.base)
    assert trained.difference(text) > 1e-2
    assert trained.difference(PeftModel.from_pretrained(text, trained.folder)) < 1e-4
    assert trained.build("build_lora_adapter", tmp_path / "lora") == ""
    whole = AutoModelForImageTextToText.from_pretrained(trained.base)
    assert trained.difference(PeftModel.from_pretrained(whole, tmp_path / "lora")) < 1e-4
    assert trained.build("build_hf_model", tmp_path / "merged") == ""
    assert trained.difference(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")) < 1e-4
