"""Exported adapters in other tools: PEFT computes with the files what the server trained."""

import json
import urllib.request
from pathlib import Path

import numpy as np
import pyrage
import pytest
import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tinker import types

from tests.support.servers.serving import MODEL, SdkServer, logprobs_of, sequences, tinker_data
from twinkle.model.transformers.loading import load_for_training

HEAD, OURS = "base_model.model.model.unembed_tokens.", "base_model.model.lm_head."


def trained(service: tinker.ServiceClient, **options: bool) -> tinker.TrainingClient:
    training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=3, **options)
    for seed in (1, 2):
        training.forward_backward(tinker_data(sequences(seed)), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return training


def download(server: SdkServer, tenant: str, path: str, directory: Path) -> None:
    answer = server.rest(tenant).get_external_weights_urls(path).result()
    directory.mkdir()
    for name, url in answer.urls.items():
        (directory / name).write_bytes(urllib.request.urlopen(url).read())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_peft_computes_what_was_trained(server: SdkServer, service: tinker.ServiceClient, request, files: Path) -> None:
    training = trained(service)
    path = training.save_weights_external("out").result().path
    assert path == f"tinker://{training.model_id}/external_weights/out"
    directory = files / "out"
    download(server, request.node.name, path, directory)
    assert sorted(file.name for file in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    tensors = load_file(directory / "adapter_model.safetensors")
    assert {name for name in tensors if name.startswith(HEAD)} == {f"{HEAD}lora_A.weight", f"{HEAD}lora_B.weight"}
    assert not any(name.startswith(OURS) for name in tensors)
    # As tools that merge such files do: the head's adapter is renamed to lm_head.
    renamed = {name.replace(HEAD, OURS): tensor for name, tensor in tensors.items()}
    save_file(renamed, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    base = load_for_training(MODEL, None, None, torch.device("cpu"), {})
    model = PeftModel.from_pretrained(base, str(directory))
    assert json.loads((directory / "adapter_config.json").read_text())["lora_alpha"] == 32
    rows = sequences(50)
    expected = logprobs_of(training.forward(tinker_data(rows), "cross_entropy").result())
    for row, logprobs in zip(rows, expected, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor(row[None, :-1])).logits[0].log_softmax(-1)
        found = logits_TV.gather(-1, torch.tensor(row[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(found, logprobs, atol=2e-5)


def test_what_is_not_trained_is_not_exported(server: SdkServer, service: tinker.ServiceClient, request, files) -> None:
    """Modules that were not trained are not in the files; this also holds for an encrypted export."""
    training = trained(service, train_mlp=False, train_unembed=False)
    reader = pyrage.x25519.Identity.generate()
    recipients = [str(reader.to_public())]
    path = training.save_weights_external("secret", age_encryption_recipients=recipients).result().path
    download(server, request.node.name, path, files / "secret")
    content = pyrage.decrypt((files / "secret" / "adapter_model.safetensors.age").read_bytes(), [reader])
    (files / "plain").write_bytes(content)
    modules = {name.split(".")[-3] for name in load_file(files / "plain")}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
