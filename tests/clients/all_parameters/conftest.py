"""A server that trains all parameters of a tiny model, and the same training as a plain loop of torch."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.servers.running import Server, torch_config
from tests.support.servers.serving import close_clients
from twinkle import hub
from twinkle_client import TwinkleClient, init_tinker_client

TOLERANCE = 1e-5
NO_SETS = "tiny-no-sets"  # the same model with a sampler that has no place for a second set of weights


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with random weights. Its embedding is its head, too."""
    shape = hub.resolve("random://llama-tiny").path
    folder = tmp_path_factory.mktemp("models") / "tiny-full"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shape)
    config.update({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shape).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    """A server with train_mode: full in fp32, under two names: see NO_SETS."""
    other = folder.with_name(NO_SETS)
    other.symlink_to(folder)
    config = torch_config(str(folder), train_mode="full")
    model, sampler = torch_config(str(other), train_mode="full")["applications"][1:3]
    sampler["args"]["max_weight_sets"] = 0
    config["applications"] += [{**model, "name": "other"}, {**sampler, "name": "other-sampler"}]
    running = Server(tmp_path_factory.mktemp("server"), config, housekeeping=0.2).start()
    yield running
    close_clients(running.url)
    assert running.stop() == 0
    assert "Traceback" not in running.log()


@pytest.fixture
def sdk(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tinker.ServiceClient]]:
    """``sdk(tenant)`` makes a ServiceClient of the SDK. At the end their sessions end, which frees the model."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.setenv(name, "")  # restored afterwards
    services: list[tinker.ServiceClient] = []

    def make(tenant: str) -> tinker.ServiceClient:
        init_tinker_client(server.url, f"tml-{tenant}")
        services.append(tinker.ServiceClient())
        return services[-1]

    yield make
    for service in services:
        service.close("success").result()


@pytest.fixture
def native(server: Server) -> Iterator[Callable[[str], TwinkleClient]]:
    """``native(tenant)`` makes a client of the native protocol. At the end their sessions end."""
    clients: list[TwinkleClient] = []

    def make(tenant: str) -> TwinkleClient:
        clients.append(TwinkleClient(server.url, f"tml-{tenant}"))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


class PlainLoop:
    """The model in plain Transformers and torch.optim, trained with the sum over all targets."""

    def __init__(self, folder: Path, optimizer: Callable[..., torch.optim.Optimizer], **options: object) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = optimizer(self.model.parameters(), **options)

    def logprobs(self, row: Sequence[int]) -> torch.Tensor:
        """Return the log-probability of each token of the row after the first."""
        logits_TV = self.model(torch.tensor(row)[None, :-1]).logits[0]
        targets = torch.tensor(row)[1:, None]
        return logits_TV.log_softmax(-1).gather(-1, targets)[:, 0]

    def add_gradient(self, rows: Sequence[Sequence[int]], share: float = 1.0) -> float:
        """Add the gradient of the rows' loss times ``share``; return the loss."""
        loss = -sum(self.logprobs(row).sum() for row in rows)
        (loss * share).backward()
        return float(loss.detach())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, rows: Sequence[Sequence[int]]) -> float:
        loss = self.add_gradient(rows)
        self.step()
        return loss

    def assert_same_weights(self, folder: Path) -> None:
        """Compare with the weights of a checkpoint, in fp32."""
        found, expected = load_file(folder / "model.safetensors"), dict(self.model.named_parameters())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=TOLERANCE, rtol=TOLERANCE)


def rows_of(seed: int, count: int = 2) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 250, length).tolist() for length in generator.integers(6, 14, count)]


def files_of(server: Server, address: str) -> Path:
    """Return the folder of a checkpoint in the server's data directory."""
    run, kind, name = address.partition("://")[2].split("/")
    (folder,) = (server.data_dir / "checkpoints" / run.replace(":", "-") / kind / name).glob("[0-9]*")
    return folder
