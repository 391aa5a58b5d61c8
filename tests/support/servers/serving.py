"""A server with a tiny real model, clients of the tinker SDK for it, and data to train on."""

import gc
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.lib.internal_client_holder import InternalClientHolder

from tests.support.servers.running import BACKEND, Server, real_model
from twinkle.model import Datum

# The sampler that these tests use: torch, vllm (make test-vllm) or mock (its numbers are made up; some tests are
# skipped).
SAMPLER = os.environ.get("TWINKLE_TEST_SAMPLER", "torch")
_TINY = "random://llama-tiny-wide" if SAMPLER == "vllm" else "random://llama-tiny"
MODEL = os.environ.get("TWINKLE_TEST_MODEL", _TINY)  # a random:// model on which a test server trains and samples
ALIAS = "org/tiny"


class SdkServer(Server):
    """A server with a tiny model. It makes SDK clients for any tenant, and its log names every device batch."""

    def __init__(
        self,
        directory: Path,
        sampler: str = SAMPLER,
        sections: Mapping[str, Any] | None = None,
        model: str = MODEL,
        **tuning: float,
    ) -> None:
        """Create the server without starting it.

        ``sections`` are further keys of the configuration; ``tuning`` holds settings of tuned_launch.py.
        """
        mock = {"model_id": model, "backend": "mock", "aliases": [ALIAS]}
        applications = [
            {"name": "server", "import_path": "server"},
            {"name": "model", "import_path": "model", "args": mock}
            if sampler == "mock"
            else real_model(model, aliases=[ALIAS]),
            {"name": "sampler", "import_path": "sampler", "args": {"model_id": model, "sampler_type": sampler}},
        ]
        super().__init__(directory, {"applications": applications, **(sections or {})}, **tuning)

    def command(self, *arguments: str) -> list[str]:
        return super().command(*arguments, "--log-level", "debug")

    def service(self, tenant: str) -> tinker.ServiceClient:
        """Return the SDK's client for the tenant with this name."""
        return tinker.ServiceClient(base_url=self.url, api_key=key_of(tenant))

    def rest(self, tenant: str) -> tinker.RestClient:
        """Return the SDK's REST client for the tenant with this name."""
        return tinker.RestClient(base_url=self.url, api_key=key_of(tenant))

    def batches(self) -> list[list[str]]:
        """Return the request ids of every device batch so far, in order."""
        lines = [line.partition(" batch: ")[2] for line in self.log().splitlines() if " batch: " in line]
        return [line.split() for line in lines]


def close_clients(url: str) -> None:
    """Close all clients of the SDK in this process that use a server which is about to stop.

    Otherwise their heartbeats and telemetry go on, and warn during the tests that follow.
    """
    for holder in [each for each in gc.get_objects() if type(each) is InternalClientHolder]:
        if holder._base_url.startswith(url):
            holder.run_coroutine_threadsafe(holder.aclose()).result(60)


def key_of(tenant: str) -> str:
    """Return the API key of the tenant with this name."""
    return "tml-" + re.sub(r"[^a-z0-9]", "", tenant.lower())


def sequences(seed: int, count: int = 3, length: int = 12, vocab: int = 256) -> list[np.ndarray]:
    """Return ``count`` rows of random tokens; each has one token more than ``length``."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, length + 1) for _ in range(count)]


def tinker_data(rows: list[np.ndarray], weights: float = 1.0) -> list[types.Datum]:
    """Return the rows as the SDK's datums. The target of each token is the next one."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:].tolist(), "weights": [weights] * (len(row) - 1)},
        )
        for row in rows
    ]


def trainer_data(rows: list[np.ndarray], weights: float = 1.0) -> list[Datum]:
    """Return the same datums as :func:`tinker_data` in the form that a Trainer takes."""
    return [Datum(row[:-1], row[1:], np.full(len(row) - 1, weights, np.float32)) for row in rows]


def logprobs_of(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    """Return the log-probabilities of each datum."""
    return [np.array(entry["logprobs"].data, np.float32) for entry in output.loss_fn_outputs]


def agree(mine: np.ndarray, theirs: np.ndarray, atol: float = 1e-5) -> bool:
    """Return whether a Trainer in this process and the server have computed the same bits.

    A model that Megatron has cut adds up in another order: then they may differ by ``atol``.
    """
    if BACKEND == "megatron":
        return mine.shape == theirs.shape and bool(np.allclose(mine, theirs, rtol=0, atol=atol))
    return mine.tobytes() == theirs.tobytes()


def agreeing(metrics: Mapping[str, float], rel: float = 1e-5) -> Any:
    """Return what metrics of the server must equal; with Megatron they may differ by ``rel``, for the same reason."""
    return pytest.approx(dict(metrics), rel=rel) if BACKEND == "megatron" else dict(metrics)


def worst_difference(model: Any, rows: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the largest difference between ``expected``, log-probabilities of rows, and those of a plain model."""
    worst = 0.0
    for row, logprobs in zip(rows, expected, strict=True):
        with torch.no_grad():
            logprobs_TV = model(torch.tensor(row[None, :-1])).logits[0].log_softmax(-1)
        found = logprobs_TV.gather(-1, torch.tensor(row[1:])[:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(found - logprobs).max()))
    return worst


def waiting_samples(server: SdkServer) -> int:
    """Return how many samples wait at the server's only model."""
    status = httpx.get(f"{server.url}/api/v1/status", trust_env=False).json()
    (model,) = status["models"].values()
    return int(model["waiting_samples"])


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true, for at most 60 seconds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
