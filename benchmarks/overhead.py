"""Wall time, GPU time and number of kernels of the small passes that a server runs all day.

A pass whose wall time is much longer than its GPU time waits for the host. The passes run on one trainer, with a torch
sampler beside it, as in a server:

    train    forward_backward of several tenants in one call, each with --seqs sequences of --len tokens
    step     the same for one tenant, followed by its optim_step; and once more with 16 tokens
    prompts  the first token of several requests, each with a prompt of its own and the version of another tenant
    decode   --tokens tokens of several sequences: eight samples of each prompt, its pass included

Wall times are medians after a warm-up, without the profiler. GPU time is the sum of the durations of all kernels in one
further, profiled repeat; kernels inside CUDA graphs count one by one. Copies (memcpy, memset) are counted separately.

    python benchmarks/overhead.py --model 1b --json build/bench/overhead.json
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from multi_tenant import ADAM, check
from one_gpu import (
    MODELS,
    add_common_arguments,
    machine,
    make_adapters,
    random_prompts,
    run_requests,
    synchronize,
    write_json,
)

from twinkle import Datum, Trainer, TrainItem
from twinkle.sampler import SampleRequest, SamplingParams, TorchSampler

WARM_UPS = 3
SHORT = 16  # tokens of the shortest training pass
SAMPLES = 8  # of a prompt, in "decode"


@dataclass(frozen=True)
class Pass:
    """One row of the table: ``count`` tenants, prompts or sequences."""

    kind: str
    count: int
    tokens: int  # that one run trains, computes or draws
    run: Callable[[], object]


@dataclass(frozen=True)
class DeviceWork:
    """What the GPU did in one profiled run."""

    gpu_ms: float
    kernels: int
    copies: int
    copies_ms: float


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    trainer = Trainer.from_pretrained(MODELS[args.model], device=args.device, dtype=args.dtype)
    sampler = TorchSampler(trainer, None, max_sequences=max(64, *args.sequences))
    adapters = make_adapters(trainer, max(args.tenants), args.rank)
    for name in adapters:
        sampler.publish(f"v-{name}", name)
    print(f"start-up {time.perf_counter() - started:.1f} s; {trainer.memory}; {sampler.memory}", flush=True)
    report: dict[str, Any] = {
        "model": args.model,
        "dtype": args.dtype,
        "rank": args.rank,
        "seqs": args.seqs,
        "length": args.length,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "machine": machine(args.device),
        "rows": [],
    }
    passes = [*training_passes(args, trainer, adapters), *sampling_passes(args, trainer, sampler, adapters)]
    for each in passes:
        report["rows"].append(wall_times(args, each))
        print_row(report["rows"][-1])
        write_json(args.json, report)
    if args.device.startswith("cuda"):
        # All wall times come first, because launches may stay slower once a profiler was used.
        for each, row in zip(passes, report["rows"], strict=True):
            row |= asdict(profiled(each.run))
            print_row(row)
            write_json(args.json, report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="tenants of a training pass")
    parser.add_argument("--seqs", type=int, default=2, help="training sequences per tenant")
    parser.add_argument("--len", type=int, default=512, dest="length", help="tokens per training sequence")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 4, 16], help="prompts of a prompt pass")
    parser.add_argument("--prompt", type=int, default=256, help="tokens per prompt")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 48, 128], help="sequences that decode at once")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to draw per sequence")
    args = parser.parse_args()
    if uneven := [number for number in args.sequences if number % SAMPLES]:
        parser.error(f"--sequences: got {uneven}, allowed: multiples of {SAMPLES}")
    return args


# --- passes -----------------------------------------------------------------------------------------------------------


def training_passes(args: argparse.Namespace, trainer: Trainer, adapters: Sequence[str]) -> list[Pass]:
    generator = np.random.default_rng(0)

    def item(adapter: str, sequences: int, length: int) -> TrainItem:
        rows = random_prompts(generator, trainer.architecture.vocab_size, [length + 1] * sequences)
        return TrainItem(adapter, [Datum(row[:-1], row[1:]) for row in rows])

    items = [item(adapter, args.seqs, args.length) for adapter in adapters]
    short = [item(adapters[0], 1, SHORT)]

    def train(number: int) -> Callable[[], object]:
        return lambda: check(trainer.forward_backward(items[:number]))

    def step(work: list[TrainItem]) -> Callable[[], object]:
        return lambda: (check(trainer.forward_backward(work)), trainer.optim_step(adapters[0], ADAM))

    each = args.seqs * args.length
    return [
        *(Pass("train", number, number * each, train(number)) for number in args.tenants),
        Pass("step", 1, each, step(items[:1])),
        Pass("step", 1, SHORT, step(short)),
    ]


def sampling_passes(
    args: argparse.Namespace, trainer: Trainer, sampler: TorchSampler, adapters: Sequence[str]
) -> list[Pass]:
    generator, numbers = np.random.default_rng(1), count()

    def requests(prompts: int, samples: int, tokens: int) -> list[SampleRequest]:
        """Return requests with prompts that were never used before, so that none is in the cache."""
        made = random_prompts(generator, trainer.architecture.vocab_size, [args.prompt] * prompts)
        params = SamplingParams(max_tokens=tokens, temperature=1.0, stop_at_eos=False)
        return [
            SampleRequest(f"r{next(numbers)}", f"v-{adapters[number % len(adapters)]}", prompt, params, samples)
            for number, prompt in enumerate(made)
        ]

    def sample(prompts: int, samples: int, tokens: int) -> Callable[[], object]:
        return lambda: run_requests(sampler, requests(prompts, samples, tokens))

    return [
        *(Pass("prompts", number, number * args.prompt, sample(number, 1, 1)) for number in args.prompts),
        *(
            Pass("decode", number, number * args.tokens, sample(number // SAMPLES, SAMPLES, args.tokens))
            for number in args.sequences
        ),
    ]


# --- measuring --------------------------------------------------------------------------------------------------------


def wall_times(args: argparse.Namespace, each: Pass) -> dict[str, Any]:
    for _ in range(WARM_UPS):
        each.run()
    seconds = []
    for _ in range(args.repeats):
        synchronize(args.device)
        started = time.perf_counter()
        each.run()
        synchronize(args.device)
        seconds.append(time.perf_counter() - started)
    wall = statistics.median(seconds)
    return {
        "kind": each.kind,
        "count": each.count,
        "tokens": each.tokens,
        "wall_ms": 1000 * wall,
        "all_wall_ms": [1000 * one for one in seconds],
        "tokens_per_s": each.tokens / wall,
    }


def profiled(run: Callable[[], object]) -> DeviceWork:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return read_trace(json.loads(trace.read_text()))


def read_trace(trace: dict[str, Any]) -> DeviceWork:
    """Add up the kernels and copies of a trace in Chrome's format, whose durations are microseconds."""
    kernels, copies = [], []
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            kernels.append(event["dur"])
        elif event.get("cat") in ("gpu_memcpy", "gpu_memset"):
            copies.append(event["dur"])
    return DeviceWork(sum(kernels) / 1000, len(kernels), len(copies), sum(copies) / 1000)


def print_row(row: dict[str, Any]) -> None:
    device = (
        f", GPU {row['gpu_ms']:.2f} ms, {row['kernels']} kernels, {row['copies']} copies" if "gpu_ms" in row else ""
    )
    print(
        f"{row['kind']} {row['count']} ({row['tokens']} tokens): wall {row['wall_ms']:.2f} ms{device}, "
        f"{row['tokens_per_s']:.0f} tokens/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
