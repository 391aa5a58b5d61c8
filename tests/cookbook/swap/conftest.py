"""Fixtures that run cookbook scripts twice on a tiny model: as they are, and with swapped imports on a server."""

import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import twinkle
import twinkle_client
from tests.support.paths import ROOT
from tests.support.servers.running import Server, torch_config
from twinkle import hub
from twinkle_client import TwinkleClient
from twinkle_client.client import current

COOKBOOK = ROOT / "cookbook"
_IMPORT = re.compile(r"^(import|from) twinkle\b", re.M)


@dataclass
class Record:
    """What a run of a script computed: the loss of each pass, and all samples; its global names and its output."""

    losses: list[float] = field(default_factory=list)
    samples: list[tuple[list[int], list[float]]] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()


def swapped(text: str, connection: str) -> str:
    """Return a script for the client: other imports, and the lines of connection after them."""
    text = _IMPORT.sub(r"\1 twinkle_client", text).replace("twinkle.initialize(", "twinkle_client.initialize(")
    last = max(match.end() for match in re.finditer(r"^(import|from) .*$", text, re.M))
    return f"{text[:last]}\n{connection}{text[last:]}"


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    """Bypasses proxies for 127.0.0.1."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setitem(os.environ, name, "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A folder with a model of two layers; scripts also load it with plain Transformers."""
    shape, folder = hub.resolve("random://llama-tiny").path, tmp_path_factory.mktemp("models") / "tiny-swap"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shape)
    config.update({"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shape).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def full_model(model) -> str:
    """The folder of a model with the same weights, whose parameters are all trained on the server."""
    folder = Path(f"{model}-full")
    folder.symlink_to(model)
    return str(folder)


@pytest.fixture(scope="session")
def server(tmp_path_factory, model, full_model) -> Iterator[Server]:
    """A server with both models in fp32."""
    config = torch_config(model)
    whole = torch_config(full_model, train_mode="full")["applications"][1]
    config["applications"].append({**whole, "name": "full"})
    running = Server(tmp_path_factory.mktemp("server"), config).start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def session(server) -> Iterator[TwinkleClient]:
    """A session that several scripts share, because each session starts a worker process for its datasets."""
    with TwinkleClient(server.url, "tml-swap") as client:
        yield client


@pytest.fixture
def run(model, server, monkeypatch, tmp_path) -> Iterator[Callable[..., Record]]:
    """``run(script, *arguments, connection=…)`` runs a script on the server; without a connection, locally as it is.

    ``client``: the client that the program has already made when the script begins.
    """
    monkeypatch.setenv("TWINKLE_MODEL", model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    (tmp_path / "cookbook").mkdir()
    (tmp_path / "cookbook" / "data").symlink_to(COOKBOOK / "data")

    def run(
        script: str, *arguments: object, connection: str | None = None, client: TwinkleClient | None = None
    ) -> Record:
        record = Record(folder=tmp_path / ("local" if connection is None else "server"))
        record.folder.mkdir()
        path = COOKBOOK / script
        if connection is not None:
            path = tmp_path / "cookbook" / script
            path.parent.mkdir(parents=True)
            path.write_text(swapped((COOKBOOK / script).read_text(), connection.format(url=server.url)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(current, "_default", client)
            patch.setattr(current, "_chosen_server", client is not None)
            watch(record, patch)
            if script.startswith("local/"):
                watch_trainers(record, patch)
            patch.setattr(sys, "argv", [script, *map(str, arguments)])
            if not script.startswith("local/"):
                sys.argv += ["--curve", str(record.folder / "curve.json")]
            if script.startswith("transformers/"):
                sys.argv += ["--output", str(record.folder)]
            record.names = runpy.run_path(str(path), run_name="__main__")
            twinkle.shutdown()
            if client is None:
                twinkle_client.shutdown()
        return record

    yield run
    torch.set_num_threads(threads)


def watch(record: Record, patch: pytest.MonkeyPatch) -> None:
    """Record losses and samples of both packages. Advantages go by position: a random model never adds correctly."""
    import twinkle.advantage
    import twinkle.model
    import twinkle.sampler
    import twinkle_client.advantage
    import twinkle_client.model
    import twinkle_client.sampler

    def with_losses(original):
        def forward_backward(self, *args, **kwargs):
            outputs = original(self, *args, **kwargs)
            record.losses.append(float(outputs["loss"]))
            return outputs

        return forward_backward

    def with_samples(original):
        def sample(self, *args, **kwargs):
            responses = original(self, *args, **kwargs)
            for sequence in (each for response in responses for each in response.sequences):
                logprobs = [pairs[0][1] for pairs in sequence.logprobs or []]
                record.samples.append((list(sequence.tokens), logprobs))
            return responses

        return sample

    for kind in (
        twinkle.model.TransformersModel,
        twinkle.model.MultiLoraTransformersModel,
        twinkle_client.model.MultiLoraTransformersModel,
    ):
        patch.setattr(kind, "forward_backward", with_losses(kind.forward_backward))
    for kind in (twinkle.sampler.LocalSampler, twinkle_client.sampler.LocalSampler):
        patch.setattr(kind, "sample", with_samples(kind.sample))
    for kind in (twinkle.advantage.GRPOAdvantage, twinkle_client.advantage.GRPOAdvantage):
        patch.setattr(kind, "__call__", lambda _, rewards, num_generations: np.linspace(-1, 1, len(rewards)))


def watch_trainers(record: Record, patch: pytest.MonkeyPatch) -> None:
    """Record the losses of all items. Only for scripts without models, whose passes would be recorded twice."""

    def with_losses(original):
        def forward_backward(self, items):
            results = original(self, items)
            record.losses += [result.metrics["loss:sum"] for result in results]
            return results

        return forward_backward

    for kind in (twinkle.Trainer, twinkle_client.Trainer):
        patch.setattr(kind, "forward_backward", with_losses(kind.forward_backward))
