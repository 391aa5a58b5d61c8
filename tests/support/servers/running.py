"""Start real server processes for tests, and talk to them over HTTP as a tenant.

    def test_something(server, tenant):            # the shared mock server, and a tenant of this test only
        model = tenant.model()
        tenant.result(tenant.forward_backward(model, 1))

    def test_crash(own_server):                    # a server with its own data directory, which may be killed
        server = own_server(**{"pass": 0.5})       # settings of tuned_launch.py
        server.kill()
        server.start()

The fixtures are in tests/server/conftest.py. If TWINKLE_TEST_POSTGRES names a PostgreSQL cluster (make test-postgres),
each server keeps its state in a database of that cluster. With TWINKLE_TEST_RUNTIME=ray (make test-ray) each server
starts its own Ray cluster. With TWINKLE_TEST_BACKEND=megatron beside it (make test-megatron) real models are trained by
groups of processes with megatron-core.

Responses are plain httpx responses. Requests are dictionaries, or protobuf messages where the protocol needs them.
"""

import contextlib
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from tests.support.paths import PROGRAMS, ROOT
from tests.support.servers.forked_servers import ForkedProcess, fork_server
from tests.support.servers.postgres_cluster import cluster_url, new_database
from twinkle.server.wire import tinker_pb2 as pb

MODEL = "mock"
CHECKS = {"TWINKLE_CHECK_THREADS": "1"}
_LAUNCH = [sys.executable, str(PROGRAMS / "tuned_launch.py")]
RUNTIME = os.environ.get("TWINKLE_TEST_RUNTIME", "embedded")
_RAY_GAVE_UP = "The current node timed out during startup"  # after 30 s, which cannot be changed: the machine is busy
BACKEND = os.environ.get("TWINKLE_TEST_BACKEND", "transformers")
# On Ray five kinds of processes start one after the other, and each of a group loads torch and megatron-core.
_START_SECONDS = 480.0 if RUNTIME == "ray" else 120.0


_PORTS_GIVEN: set[int] = set()


def free_port() -> int:
    """Return a free port below the range from which the system takes client ports.

    A client port in that range could otherwise take the server's port while the server is down. For the same reason no
    port is returned twice, and each of the processes that run the tests has its own ports.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.randrange(20_000 + worker, 30_000, workers)
        if port in _PORTS_GIVEN:
            continue
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            _PORTS_GIVEN.add(port)
            return port


def mock_config(**sections: Any) -> dict[str, Any]:
    """Return the configuration of a server with the mock model. ``sections`` are further top-level keys."""
    return {
        "applications": [
            {"name": "server", "import_path": "server"},
            {"name": "model", "import_path": "model", "args": {"model_id": MODEL, "backend": "mock"}},
            {"name": "sampler", "import_path": "sampler", "args": {"model_id": MODEL, "sampler_type": "mock"}},
        ],
        **sections,
    }


# Of models that tensor parallelism cannot divide: they have one key-value head.
_MESHES: Mapping[str, Mapping[str, int]] = {"random://qwen3-moe-tiny": {"dp_size": 2, "ep_size": 2}}


def real_model(
    model_id: str, *, name: str = "model", mesh: Mapping[str, int] | None = None, **args: Any
) -> dict[str, Any]:
    """Return the application of a real model on the CPU in fp32. ``args``: further arguments of it.

    ``mesh``: how Megatron divides it, by default among four processes, and one with experts between two; Transformers
    trains it in one process.
    """
    if BACKEND != "megatron":
        of_backend: dict[str, Any] = {"backend": BACKEND, "device": "cpu"}
        whole = {"model_id": model_id, "dtype": "fp32", **of_backend, **args}
        return {"name": name, "import_path": "model", "args": whole}
    sizes = dict(mesh or _MESHES.get(model_id, {"tp_size": 2, "pp_size": 2}))
    ranks = math.prod(size for key, size in sizes.items() if key != "ep_size")  # experts are divided among the others
    group = {"name": name, "ranks": ranks, "device_type": "cpu"}
    of_backend = {"backend": BACKEND, "device_group": group, "device_mesh": sizes}
    return {
        "name": name,
        "import_path": "model",
        "args": {"model_id": model_id, "dtype": "fp32", **of_backend, **args},
        "deployments": [{"ray_actor_options": {"num_cpus": 0}}],  # more processes than there are cores
    }


def torch_config(model_id: str, **model_args: Any) -> dict[str, Any]:
    """Return the configuration of a server with a real model on the CPU in fp32, its torch sampler, and processors.

    ``model_args``: further arguments of the model.
    """
    return {
        "applications": [
            {"name": "server", "import_path": "server"},
            real_model(model_id, **model_args),
            {"name": "sampler", "import_path": "sampler", "args": {"model_id": model_id, "sampler_type": "torch"}},
            {"name": "processor", "import_path": "processor"},
        ]
    }


class Server:
    """A server process on its own port. It can be killed and started again on the same data and port.

    ``directory`` receives config.yaml, server.log and the data directory. ``tuning`` holds settings for
    tuned_launch.py.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any] | None = None, **tuning: float) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.tuning = tuning
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._said_before = 0
        cluster = cluster_url()
        self.database = None if cluster is None else new_database(cluster)  # None: use the default, SQLite
        self.configure(config or mock_config())

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the configuration that the next start will read."""
        http = {"host": "127.0.0.1", "port": self.port}
        content = {"runtime": RUNTIME, "data_dir": str(self.data_dir), "http_options": http, **config}
        if self.database is not None:
            content = {"persistence": {"url": self.database}, **content}
        (self.directory / "config.yaml").write_text(json.dumps(content))  # JSON is YAML

    @property
    def config(self) -> dict[str, Any]:
        """Return the configuration as it is in config.yaml."""
        content: dict[str, Any] = yaml.safe_load((self.directory / "config.yaml").read_text())
        return content

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of ``twinkle-server`` with this server's tuning."""
        tuning = [f"{name}={seconds}" for name, seconds in self.tuning.items()]
        return [*_LAUNCH, *tuning, "--", *arguments]

    def spawn(self) -> "Server":
        """Start the process and return at once."""
        assert self.process is None or self.process.poll() is not None, "it runs already"
        with (self.directory / "server.log").open("ab") as log:
            self._said_before = log.tell()
            command = self.command("launch", "-c", str(self.directory / "config.yaml"))
            forked = None
            if RUNTIME == "embedded" and command[:2] == _LAUNCH:
                forked = fork_server(command[2:], environment(), log)
            self.process = forked or subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
            )
        return self

    def start(self) -> "Server":
        """Start the process and wait until it is healthy."""
        self.spawn()
        assert self.process is not None
        deadline = time.monotonic() + _START_SECONDS
        while not self.is_healthy():
            if self.process.poll() is not None and _RAY_GAVE_UP in self._said() and time.monotonic() < deadline:
                self.spawn()
            elif self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise AssertionError(f"the server did not start\n{self.log()}")
            time.sleep(0.02)
        return self

    def is_healthy(self) -> bool:
        """Return whether the server answers its health check; on Ray also whether it has announced its address."""
        try:
            answer = httpx.get(f"{self.url}/api/v1/healthz", timeout=5, trust_env=False, verify=False)
            return answer.status_code == 200 and bool(answer.json() == {"status": "ok"}) and self._announced()
        except httpx.HTTPError:
            return False

    def _announced(self) -> bool:
        """Return whether the server has announced its address.

        On Ray the gateway may answer before the model is ready.
        """
        return RUNTIME != "ray" or "listening on" in self._said()

    def _said(self) -> str:
        """Return what the present process has logged on its own terminal."""
        return (self.directory / "server.log").read_bytes()[self._said_before :].decode(errors="replace")

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait until it has ended."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(120)

    def stop(self) -> int:
        """Send SIGTERM, wait for the end of the process, and return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def close(self) -> None:
        """Kill the process if it is still running."""
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def log(self) -> str:
        """Return everything that this process and its predecessors in this directory have logged."""
        files = [self.directory / "server.log", *sorted(self.data_dir.glob("logs/*.log"))]
        return "".join(file.read_text(errors="replace") for file in files)


# On a busy machine Ray's own limits for the start of its processes are too short.
PATIENT_RAY = {
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
}


def environment() -> dict[str, str]:
    """Return the environment for processes that talk to 127.0.0.1 or compute while other tests run."""
    local = "127.0.0.1,localhost"
    alone = {"RAY_ADDRESS": "local", **PATIENT_RAY} if RUNTIME == "ray" else {}
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}  # programs import `tests`
    return {**os.environ, **path, "NO_PROXY": local, "no_proxy": local, "OMP_NUM_THREADS": "1", **CHECKS, **alone}


# --- requests ---------------------------------------------------------------------------------------------------------


def tensor(values: Any, dtype: str = "f4", shape: Sequence[int] | None = None) -> pb.Tensor:
    """Return a dense tensor. ``shape`` may contradict the values on purpose; dtype is f4, i8 or i4."""
    array = np.asarray(values, f"<{dtype}")
    number = {"f4": pb.DTYPE_FLOAT32, "i8": pb.DTYPE_INT64, "i4": pb.DTYPE_INT32}[dtype]
    return pb.Tensor(dense=array.tobytes(), dtype=number, shape=array.shape if shape is None else shape)


def datum(tokens: Sequence[int] = (1, 2, 3, 4), **inputs: pb.Tensor) -> pb.Datum:
    """Return a row to train on. The target of each token is the next one, unless ``inputs`` has other target_tokens."""
    text = pb.EncodedTextChunk(tokens=np.asarray(tokens[:-1], "<i4").tobytes())
    targets = {"target_tokens": tensor(tokens[1:], "i8")}
    return pb.Datum(model_input=[pb.Chunk(encoded_text=text)], loss_fn_inputs={**targets, **inputs})


def training_request(
    model_id: str,
    seq_id: int,
    data: Sequence[pb.Datum] | None = None,
    loss: str = "cross_entropy",
    **fields: Any,
) -> pb.ForwardBackwardRequest:
    """Return a forward_backward request. Without ``data`` it has one row, which depends on ``seq_id``."""
    rows = [datum([seq_id % 97 + n for n in range(6)])] if data is None else data
    return pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, data=rows, loss_fn=loss, **fields)


def training_body(model_id: str, seq_id: int, data: Sequence[pb.Datum] | None = None, **fields: Any) -> bytes:
    """Return :func:`training_request` as it goes over the wire."""
    return training_request(model_id, seq_id, data, **fields).SerializeToString()


class Tenant:
    """A client with its own API key. Methods that submit an op return its request id; a refusal fails the test."""

    def __init__(self, url: str, key: str) -> None:
        self.key = key
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/",
            headers={"X-API-Key": key},
            timeout=60,
            trust_env=False,
            verify=False,  # there is no TLS here, and loading all certificates takes longer than most tests
        )

    def post(self, path: str, content: Mapping[str, Any] | bytes, **headers: str) -> httpx.Response:
        """Send a dictionary as JSON, or bytes unchanged as protobuf."""
        if isinstance(content, bytes):
            given = {"Content-Type": "application/x-protobuf", **headers}
            return self.http.post(path, content=content, headers=given)
        return self.http.post(path, json=content, headers=headers)

    def get(self, path: str, **query: Any) -> httpx.Response:
        return self.http.get(path, params=query)

    def session(self) -> str:
        return str(_good(self.post("create_session", {"tags": [], "type": "create_session"}))["session_id"])

    def model(
        self,
        session_id: str | None = None,
        number: int = 0,
        rank: int = 8,
        seed: int = 1,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Create an adapter, wait until it exists, and return its model id."""
        session_id = session_id or self.session()
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": MODEL,
            "lora_config": {"rank": rank, "seed": seed},
            "user_metadata": user_metadata,
            "type": "create_model",
        }
        return str(self.json(_good(self.post("create_model", body))["request_id"])["model_id"])

    def forward_backward(self, model_id: str, seq_id: int, data: Sequence[pb.Datum] | None = None, **kw: Any) -> str:
        return self.submit("forward_backward", training_body(model_id, seq_id, data, **kw))

    def optim_step(self, model_id: str, seq_id: int, **adam: float) -> str:
        params = {"learning_rate": 0.1, **adam}
        return self.submit("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": params})

    def save(self, model_id: str, seq_id: int, name: str, **more: Any) -> str:
        return self.submit("save_weights", {"model_id": model_id, "seq_id": seq_id, "path": name, **more})

    def load(self, model_id: str, seq_id: int, path: str, optimizer: bool = True) -> str:
        body = {"model_id": model_id, "seq_id": seq_id, "path": path, "optimizer": optimizer}
        return self.submit("load_weights", body)

    def publish(self, model_id: str, seq_id: int, number: int = 0) -> str:
        """Publish the weights for sampling, without a name."""
        body = {"model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": number}
        return self.submit("save_weights_for_sampler", body)

    def sample(self, sampling_session_id: str, seq_id: int = 0, seed: int = 7) -> str:
        return self.submit("asample", sample_body(sampling_session_id, seq_id, seed))

    def submit(self, path: str, content: Mapping[str, Any] | bytes) -> str:
        return str(_good(self.post(path, content))["request_id"])

    def poll(self, request_id: str) -> httpx.Response:
        """Send one retrieve_future request, as the SDK does, and return the response, whatever its status."""
        body = {"request_id": request_id, "allow_metadata_only": False}
        return self.post("retrieve_future", body, Accept="application/x-protobuf")

    def result(self, request_id: str, seconds: float = 60) -> bytes:
        """Wait for a result and return its bytes. A failed future has bytes too."""
        deadline = time.monotonic() + seconds
        answer = self.poll(request_id)
        while answer.status_code == 408:
            assert time.monotonic() < deadline, f"{request_id} has no result after {seconds} s"
            answer = self.poll(request_id)
        assert answer.status_code == 200, answer.text
        return answer.content

    def json(self, request_id: str) -> dict[str, Any]:
        """Wait for a result that must be JSON and not a failure."""
        result: dict[str, Any] = json.loads(self.result(request_id))
        assert "error" not in result, result
        return result

    def error(self, request_id: str, seconds: float = 60) -> str:
        """Wait for a future that must fail because of the user's mistake, and return its message."""
        result = json.loads(self.result(request_id, seconds))
        assert result["category"] == "user", result
        return str(result["error"])

    def training(self, request_id: str) -> pb.ForwardBackwardOutput:
        return pb.ForwardBackwardOutput.FromString(self.result(request_id))

    def loss(self, request_id: str) -> float:
        return float(self.training(request_id).metrics["loss:sum"])

    def tokens(self, request_id: str) -> list[int]:
        """Return the tokens of the first sequence of a sample."""
        response = pb.SampleResponse.FromString(self.result(request_id))
        return np.frombuffer(response.sequences[0].tokens, "<i4").tolist()


def sample_body(sampling_session_id: str, seq_id: int = 0, seed: int = 7, **more: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampling_session_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 12, "seed": seed, "stop": []},
        **more,
    }


def key_for(name: str) -> str:
    """Return an API key for a test with this name. The same name always gives the same key."""
    return "tml-" + re.sub(r"[^A-Za-z0-9]+", "-", name)


def _good(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content
