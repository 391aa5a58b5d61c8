"""A server process for tests, and the data they train on."""

import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from twinkle.model import Datum

MODEL = "random://llama-tiny"
ALIAS = "org/tiny"
_CONFIG = """
data_dir: {data_dir}
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - {{name: server, import_path: server}}
  - name: model
    import_path: model
    args: {{model_id: "{model}", backend: transformers, device: cpu, dtype: fp32, aliases: ["{alias}"], merge: {merge}}}
  - {{name: sampler, import_path: sampler, args: {{model_id: "{model}", sampler_type: torch}}}}
"""


class Server:
    """``twinkle-server launch`` on a free port, with a log that names every device batch."""

    def __init__(self, directory: Path, *, merge: bool = True) -> None:
        self.directory = directory
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "server.log"
        self._config = directory / "config.yaml"
        text = _CONFIG.format(
            data_dir=directory / "data", port=self.port, model=MODEL, alias=ALIAS, merge=str(merge).lower()
        )
        self._config.write_text(text)

    def __enter__(self) -> "Server":
        command = [sys.executable, "-m", "twinkle.server", "launch", "-c", str(self._config), "--log-level", "debug"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log.read_text()

    def service(self, tenant: str) -> tinker.ServiceClient:
        key = "tml-" + re.sub(r"[^a-z0-9]", "", tenant.lower())
        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def rest(self, tenant: str) -> tinker.RestClient:
        key = "tml-" + re.sub(r"[^a-z0-9]", "", tenant.lower())
        return tinker.RestClient(base_url=self.url, api_key=key)

    def batches(self) -> list[list[str]]:
        """The request ids of every batch of passes so far, in order."""
        lines = [line.partition(" batch: ")[2] for line in self.log.read_text().splitlines() if " batch: " in line]
        return [line.split() for line in lines]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def sequences(seed: int, count: int = 3, length: int = 12, vocab: int = 256) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, length + 1) for _ in range(count)]


def tinker_data(rows: list[np.ndarray], weights: float = 1.0) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:].tolist(), "weights": [weights] * (len(row) - 1)},
        )
        for row in rows
    ]


def trainer_data(rows: list[np.ndarray], weights: float = 1.0) -> list[Datum]:
    return [Datum(row[:-1], row[1:], np.full(len(row) - 1, weights, np.float32)) for row in rows]


def logprobs_of(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [np.array(entry["logprobs"].data, np.float32) for entry in output.loss_fn_outputs]
