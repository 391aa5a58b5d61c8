"""Adapters on experts: training many tenants in one batch, and decoding with several versions.

Training, for each rank; all tenants have the same sequences of random tokens:

    fused         forward and backward pass of all tenants in one call
    ideal         the same of one tenant with all sequences
    one tenant    the same of one tenant with its own sequences
    optim steps   an AdamW step of each tenant, after a fused pass; where not all state fits on the device, it includes
                  moving master weights and moments

Decoding, for each number of requests: all requests at once, with the versions of a few adapters in turn, and without
adapters. Prompts are short, and passes over all of their tokens are included.

The columns of a comparison take turns in one process, and times are medians after a warm-up. Memory is the peak of what
torch allocated on the device during a column; on a CPU it is not measured.

    python benchmarks/experts.py --json build/bench/experts.json
    python benchmarks/experts.py --only train --ranks 8 --tenants 4 --len 128
    python benchmarks/experts.py --only train --ranks 8 --kernels 25
"""

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_gpu import machine, make_adapters, random_prompts, run_requests, synchronize, write_json
from torch.profiler import ProfilerActivity, profile

from twinkle import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.sampler import SampleRequest, SamplingParams, TorchSampler

ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
WARM_UP = 2
GIB = 2**30


def main() -> None:
    args = parse_arguments()
    report: dict[str, Any] = {
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "machine": machine(args.device),
        "training": [],
        "decoding": [],
    }
    if args.only != "decode":
        for rank in args.ranks:
            report["training"].append(train(args, rank))
            release_memory(args)
            print_training(report["training"][-1])
            write_json(args.json, report)
    if args.only != "train":
        report["decoding"] = decode(args)
        print_decoding(report["decoding"])
    write_json(args.json, report)


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=f"random://{'qwen3-30b-a3b' if cuda else 'qwen3-moe-tiny'}")
    parser.add_argument("--only", choices=("train", "decode"), default=None, help="measure only one of the two")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--seqs", type=int, default=2, help="sequences of a tenant")
    parser.add_argument("--len", type=int, default=512 if cuda else 64, dest="length", help="tokens of a sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 8], help="of all tenants; one table each")
    parser.add_argument("--max-tokens", type=int, default=None, help="tokens of a batch; by default what fits")
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 256] if cuda else [4])
    parser.add_argument("--adapters", type=int, default=4, help="whose versions the requests use in turn")
    parser.add_argument("--decode-rank", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--draw", type=int, default=256 if cuda else 16, help="tokens to draw for a request")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if cuda else "fp32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=0, help="also print so many kernels of a fused pass, by time")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    for name in ("tenants", "seqs", "length", "adapters", "decode_rank", "prompt", "draw", "repeats"):
        if getattr(args, name) < 1:
            option = "len" if name == "length" else name.replace("_", "-")
            parser.error(f"--{option}: got {getattr(args, name)}, allowed: an integer ≥ 1")
    for name in ("ranks", "requests"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name}: got {min(getattr(args, name))}, allowed: integers ≥ 1")
    return args


def load(args: argparse.Namespace) -> Trainer:
    started = time.perf_counter()
    trainer = Trainer.from_pretrained(
        args.model, device=args.device, dtype=args.dtype, max_tokens_per_batch=args.max_tokens
    )
    print(f"{args.model}: start-up {time.perf_counter() - started:.1f} s; {trainer.memory}", flush=True)
    return trainer


# --- training ---------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    trainer = load(args)
    names = [f"t{number}" for number in range(args.tenants)]
    for number, name in enumerate(names):
        trainer.create_adapter(name, LoraSpec(rank, seed=number))
    generator = np.random.default_rng(0)
    data = [make_data(args, trainer, generator) for _ in names]
    items = [TrainItem(name, own) for name, own in zip(names, data, strict=True)]
    everything = [TrainItem(names[0], [datum for own in data for datum in own])]
    tokens = sum(len(datum.tokens) for own in data for datum in own)

    def forward_backward(batch: list[TrainItem]) -> Callable[[], None]:
        def run() -> None:
            for result in trainer.forward_backward(batch):
                assert isinstance(result, TrainResult), result

        return run

    def optimizer_steps() -> None:
        for name in names:
            trainer.optim_step(name, ADAM)

    columns = {
        "fused": forward_backward(items),
        "ideal": forward_backward(everything),
        "one tenant": forward_backward(items[:1]),
        "optim steps": optimizer_steps,
    }
    tokens_of = {"fused": tokens, "ideal": tokens, "one tenant": tokens // args.tenants}
    seconds: dict[str, list[float]] = {name: [] for name in columns}
    peaks: dict[str, list[int]] = {name: [] for name in columns}
    for number in range(WARM_UP + args.repeats):  # the first step makes B other than 0
        for name in ("ideal", "one tenant", "fused", "optim steps"):
            taken, peak = timed(args, columns[name])
            if number >= WARM_UP:
                seconds[name].append(taken)
                peaks[name] += [] if peak is None else [peak]
            if name in ("ideal", "one tenant"):
                trainer.zero_grad(names[0])
    kernels = kernels_of(columns["fused"], args.kernels) if args.kernels and args.device.startswith("cuda") else []
    rows = {
        name: {
            "seconds": statistics.median(seconds[name]),
            "all_seconds": seconds[name],
            "tokens_per_s": tokens_of[name] / statistics.median(seconds[name]) if name in tokens_of else None,
            "peak_gib": max(peaks[name]) / GIB if peaks[name] else None,
        }
        for name in columns
    }
    return {
        "rank": rank,
        "tenants": args.tenants,
        "tokens": tokens,
        "memory": str(trainer.memory),
        "rows": rows,
        "fused_over_ideal": rows["ideal"]["seconds"] / rows["fused"]["seconds"],
        "kernels": kernels,
    }


def kernels_of(run: Callable[[], None], most: int) -> list[dict[str, Any]]:
    """Return the kernels that take most of the device's time in one run."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    found = sorted(profiled.key_averages(), key=lambda each: -each.self_device_time_total)[:most]
    return [{"name": each.key, "ms": each.self_device_time_total / 1000, "calls": each.count} for each in found]


def make_data(args: argparse.Namespace, trainer: Trainer, generator: np.random.Generator) -> list[Datum]:
    vocabulary = trainer.architecture.vocab_size
    ids = [generator.integers(0, vocabulary, args.length + 1) for _ in range(args.seqs)]
    return [Datum(each[:-1], each[1:]) for each in ids]


def timed(args: argparse.Namespace, run: Callable[[], None]) -> tuple[float, int | None]:
    """Return the seconds that a call takes, and the peak of allocated bytes on the device; None on a CPU."""
    cuda = args.device.startswith("cuda")
    synchronize(args.device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    run()
    synchronize(args.device)
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() if cuda else None


def release_memory(args: argparse.Namespace) -> None:
    gc.collect()
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode(args: argparse.Namespace) -> list[dict[str, Any]]:
    trainer = load(args)
    names = make_adapters(trainer, args.adapters, args.decode_rank)
    sampler = TorchSampler(trainer, None, max_sequences=max(args.requests))
    for name in names:
        sampler.publish(name, name)
    captured = sampler._graphs is not None
    print(f"{sampler.memory}; {'captured' if captured else 'not captured'}", flush=True)
    rows = []
    for count in args.requests:
        generator = np.random.default_rng(0)
        prompts = random_prompts(generator, trainer.architecture.vocab_size, [args.prompt] * count)
        seconds: dict[str, list[float]] = {"without": [], "with adapters": []}
        for number in range(WARM_UP + args.repeats):
            for column, versions in (("without", [None]), ("with adapters", names)):
                taken, _ = timed(args, functools.partial(draw, args, sampler, prompts, versions))
                if number >= WARM_UP:
                    seconds[column].append(taken)
        rates = {column: count * args.draw / statistics.median(taken) for column, taken in seconds.items()}
        rows.append(
            {
                "requests": count,
                "captured": captured,
                "tokens_per_s": rates,
                "all_seconds": seconds,
                "with_over_without": rates["with adapters"] / rates["without"],
            }
        )
    return rows


def draw(
    args: argparse.Namespace, sampler: TorchSampler, prompts: Sequence[np.ndarray], versions: Sequence[str | None]
) -> None:
    sampler.reset_prefix_cache()  # the same prompts come in every round
    run_requests(
        sampler,
        [
            SampleRequest(
                str(number),
                versions[number % len(versions)],
                prompt,
                SamplingParams(max_tokens=args.draw, temperature=1.0, seed=number, stop_at_eos=False),
            )
            for number, prompt in enumerate(prompts)
        ],
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def print_training(report: Mapping[str, Any]) -> None:
    print(f"\n{report['tenants']} tenants, {report['tokens']} tokens, rank {report['rank']}")
    print(f"{'':12} {'time':>11} {'tokens/s':>10} {'peak':>10}")
    for name, row in report["rows"].items():
        rate = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.0f}"
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:6.1f} GiB"
        print(f"{name:12} {1000 * row['seconds']:8.1f} ms {rate:>10} {peak:>10}")
    print(f"fused over ideal: {report['fused_over_ideal']:.3f}", flush=True)
    for kernel in report["kernels"]:
        print(f"{kernel['ms']:9.1f} ms {kernel['calls']:6} × {kernel['name'][:90]}", flush=True)


def print_decoding(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'requests':>8} {'without':>14} {'with adapters':>14} {'share':>7}   (tokens/s)")
    for row in rows:
        rates = row["tokens_per_s"]
        print(
            f"{row['requests']:8} {rates['without']:14.0f} {rates['with adapters']:14.0f} "
            f"{row['with_over_without']:7.3f}"
        )


if __name__ == "__main__":
    main()
