"""tinker-cookbook's builders read a download as it is, and their models compute what the server trained."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.cookbook.recipes.builder_runs import Job, build, download, require_cookbook, run_jobs
from tests.cookbook.recipes.offline_pictures import write_vision_model
from tests.support.models.base_folders import write_base_folder
from tests.support.models.tiny_models import random_model, tiny_config
from tests.support.servers.running import Server
from tests.support.servers.serving import (
    close_clients,
    key_of,
    logprobs_of,
    sequences,
    tinker_data,
    worst_difference,
)
from twinkle.model.adapters.expert_exports import convert_folder

pytestmark = [pytest.mark.cookbook, pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")]

BASES = ("untied", "tied")
SEES = "seeing"
HARMONY = "gpt-oss"


def write_gpt_oss(folder: Path) -> Path:
    write_base_folder(folder, tied=False)  # for its tokenizer
    experts = {"num_local_experts": 6, "num_experts_per_tok": 4, "head_dim": 8, "sliding_window": 8}
    random_model(tiny_config("GptOssConfig", vocab_size=300, **experts)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two dense models, whose head is and is not tied to its embeddings, a vision model, and gpt-oss."""
    require_cookbook()
    directory = tmp_path_factory.mktemp("builders")
    folders = {name: write_base_folder(directory / name, tied=name == "tied") for name in BASES}
    folders |= {SEES: write_vision_model(directory / SEES), HARMONY: write_gpt_oss(directory / HARMONY)}
    applications: list[dict[str, Any]] = [{"name": "server", "import_path": "server"}]
    for name, folder in folders.items():
        args = {"model_id": str(folder), "backend": "transformers", "device": "cpu", "dtype": "fp32"}
        applications.append({"name": name, "import_path": "model", "args": args})
    running = Server(directory, {"applications": applications}).start()
    yield running
    close_clients(running.url)
    assert running.stop() == 0


class Trained:
    """An adapter with a trained head, and the trainer's log-probabilities. The cookbook writes to ``folder``."""

    def __init__(self, server: Server, base: str, folder: Path) -> None:
        self.base, self.folder = server.directory / base, folder
        service = tinker.ServiceClient(base_url=server.url, api_key=key_of("builders"))
        training = service.create_lora_training_client(base_model=base, rank=4, seed=3)
        for seed in (1, 2):
            training.forward_backward(tinker_data(sequences(seed)), "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        self.rows = sequences(50)
        self.expected = logprobs_of(training.forward(tinker_data(self.rows), "cross_entropy").result())
        self._path = training.save_weights_external(base).result().path

    def jobs(self) -> list[Job]:
        """Return what downloads the adapter to ``adapter``, and writes ``lora`` and ``merged`` from it."""
        adapter = self.folder / "adapter"
        return [
            download(self._path, adapter),
            build("build_lora_adapter", self.base, adapter, self.folder / "lora"),
            build("build_hf_model", self.base, adapter, self.folder / "merged"),
        ]

    def difference(self, model: Any) -> float:
        """Return the largest difference between the trainer's log-probabilities and the model's."""
        return worst_difference(model, self.rows, self.expected)


@pytest.fixture(scope="module")
def all_trained(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {base: Trained(server, base, tmp_path_factory.mktemp(base)) for base in (*BASES, SEES, HARMONY)}


@pytest.fixture(scope="module")
def said(server: Server, all_trained: Mapping[str, Trained]) -> dict[str, list[str]]:
    """Run the jobs of all; return their errors, or "". Of the model with a tied head, a copy without is merged, too."""
    jobs = {base: trained.jobs() for base, trained in all_trained.items()}
    tied = all_trained["tied"]
    untied = written_untied(tied.base, tied.folder / "untied")
    jobs["tied"].append(build("build_hf_model", untied, tied.folder / "adapter", tied.folder / "merged-untied"))
    named = {f"{base} {number}": job for base, own in jobs.items() for number, job in enumerate(own)}
    errors = run_jobs(named, TINKER_BASE_URL=server.url, TINKER_API_KEY=key_of("builders"))
    return {base: [errors[f"{base} {number}"] for number in range(len(own))] for base, own in jobs.items()}


def written_untied(base: Path, folder: Path) -> Path:
    """Write the model with a head that is a tensor of its own."""
    untied = AutoModelForCausalLM.from_pretrained(base)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    write_base_folder(folder, tied=False)  # for its tokenizer
    untied.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("base", BASES)
def test_builders_compute_what_was_trained(
    all_trained: Mapping[str, Trained], said: Mapping[str, list[str]], base: str
) -> None:
    """Merging needs an untied base model, because in a tied one the head is also the input embedding."""
    trained, merged = all_trained[base], "merged"
    if base == "tied":
        assert "'lm_head.weight' which does not exist in the model state dict" in said[base].pop(2)
        merged = "merged-untied"
    assert not any(said[base]), said
    plain = AutoModelForCausalLM.from_pretrained(trained.base)
    assert trained.difference(plain) > 1e-2
    assert trained.difference(PeftModel.from_pretrained(plain, trained.folder / "lora")) < 1e-4
    assert trained.difference(AutoModelForCausalLM.from_pretrained(trained.folder / merged)) < 1e-4


def test_builders_of_a_vision_model_compute_what_was_trained(
    all_trained: Mapping[str, Trained], said: Mapping[str, list[str]]
) -> None:
    """A download has Tinker's names; the builders add the name of the decoder. Qwen3.5 also has a class for text.

    Its linear attention has three projections in Tinker's files and in what ``build_lora_adapter`` writes, and one in
    the model: PEFT reads the form that we write.
    """
    trained = all_trained[SEES]
    assert not any(said[SEES]), said
    text = AutoModelForCausalLM.from_pretrained(trained.base)
    assert trained.difference(text) > 1e-2
    for_text, for_images = (written_for_peft(trained.folder / name) for name in ("adapter", "lora"))
    assert trained.difference(PeftModel.from_pretrained(text, for_text)) < 1e-4
    whole = AutoModelForImageTextToText.from_pretrained(trained.base)
    assert trained.difference(PeftModel.from_pretrained(whole, for_images)) < 1e-4
    assert trained.difference(AutoModelForImageTextToText.from_pretrained(trained.folder / "merged")) < 1e-4


def test_builders_of_gpt_oss_compute_what_was_trained(
    all_trained: Mapping[str, Trained], said: Mapping[str, list[str]]
) -> None:
    """In a download its attention has Tinker's name, which the builders change; PEFT reads the form that we write."""
    trained = all_trained[HARMONY]
    assert not any(said[HARMONY]), said
    plain = AutoModelForCausalLM.from_pretrained(trained.base)
    assert trained.difference(plain) > 1e-2
    for_peft = written_for_peft(trained.folder / "lora", alternating=True)
    assert trained.difference(PeftModel.from_pretrained(plain, for_peft)) < 1e-4
    assert trained.difference(AutoModelForCausalLM.from_pretrained(trained.folder / "merged")) < 1e-4


def written_for_peft(source: Path, *, alternating: bool = False) -> Path:
    """Write an adapter in PEFT's form beside the folder that it is in; return its folder."""
    folder = source.with_name(f"{source.name}-peft")
    folder.mkdir()
    convert_folder(source, folder, "peft", alternating=alternating)
    return folder
