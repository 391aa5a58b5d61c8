"""Training a model with linear attention: sequences one after another in one row, against sequences that are padded.

Each tenant has sequences of different lengths. A step is one forward and backward pass of all tenants in one call.
*Packed* is what the trainer does. *Padded* is what it does with models whose state along the sequence it does not know:
the layers are those of Transformers, and every sequence takes as many rows as the longest of its batch. Both compute
the delta rule with the kernels of ``fla-core`` if it is installed; it must be able to compute gradients on this GPU.

The model is loaded once for each, because two of them may not fit on one device. Times are medians after a warm-up.

    python benchmarks/packed_linear_attention.py --json build/bench/packed_linear_attention.json
    python benchmarks/packed_linear_attention.py --shortest 8 --longest 64 --tenants 4
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from one_gpu import machine, synchronize, write_json

from twinkle import Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.decoder import loading

WARM_UP = 2
GIB = 2**30


def main() -> None:
    args = parse_arguments()
    rows = {"padded": measure(args, padded=True), "packed": measure(args, padded=False)}
    report = {
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "machine": machine(args.device),
        "fla": find_spec("fla") is not None,
        "rows": rows,
        "packed_over_padded": rows["padded"]["seconds"] / rows["packed"]["seconds"],
        "loss_difference": relative_difference(rows["padded"]["losses"], rows["packed"]["losses"]),
    }
    print(f"\n{rows['packed']['tokens']} tokens in sequences of {args.shortest} to {args.longest}")
    for name, row in rows.items():
        print(f"{name:8} {1000 * row['seconds']:9.1f} ms {row['tokens_per_s']:9.0f} tokens/s")
    print(f"packed over padded: {report['packed_over_padded']:.2f}")
    print(f"largest relative difference of a loss: {report['loss_difference']:.1e}", flush=True)
    write_json(args.json, report)


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=f"random://qwen3.5-{'35b-a3b' if cuda else 'tiny'}")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--seqs", type=int, default=2, help="sequences of a tenant")
    parser.add_argument("--shortest", type=int, default=64 if cuda else 16, help="tokens")
    parser.add_argument("--longest", type=int, default=2048 if cuda else 128, help="tokens")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if cuda else "fp32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    for name in ("tenants", "seqs", "shortest", "rank", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}, allowed: an integer ≥ 1")
    if args.longest < args.shortest:
        parser.error(f"--longest: got {args.longest}, allowed: an integer ≥ --shortest, which is {args.shortest}")
    return args


def measure(args: argparse.Namespace, *, padded: bool) -> dict[str, Any]:
    started = time.perf_counter()
    with all_padded() if padded else nullcontext():
        trainer = Trainer.from_pretrained(args.model, device=args.device, dtype=args.dtype)
    assert trainer.architecture.padded is padded
    print(f"{args.model}: start-up {time.perf_counter() - started:.1f} s; {trainer.memory}", flush=True)
    items = make_items(args, trainer)
    tokens, seconds = sum(len(datum.tokens) for item in items for datum in item.data), []
    for _ in range(WARM_UP + args.repeats):
        synchronize(args.device)
        started = time.perf_counter()
        outcomes = trainer.forward_backward(items)
        synchronize(args.device)
        seconds.append(time.perf_counter() - started)
    taken = statistics.median(seconds[WARM_UP:])
    row = {
        "seconds": taken,
        "all_seconds": seconds[WARM_UP:],
        "tokens": tokens,
        "tokens_per_s": tokens / taken,
        "losses": [loss_of(outcome) for outcome in outcomes],
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if args.device.startswith("cuda") else None,
    }
    del trainer, outcomes
    gc.collect()
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return row


def all_padded() -> AbstractContextManager[object]:
    """Let models that are loaded meanwhile run padded, as if we did not know the state of their linear attention."""
    return mock.patch.object(loading, "state_is_known", return_value=False)


def make_items(args: argparse.Namespace, trainer: Trainer) -> list[TrainItem]:
    """Return sequences of random tokens. Their lengths grow by the same factor each time, in a random order."""
    generator, vocabulary = np.random.default_rng(0), trainer.architecture.vocab_size
    lengths = np.geomspace(args.shortest, args.longest, args.tenants * args.seqs).round().astype(int)
    lengths = generator.permutation(lengths)

    def datum(length: int) -> Datum:
        ids = generator.integers(3, vocabulary, length + 1)
        return Datum(ids[:-1], ids[1:])

    for tenant in range(args.tenants):
        trainer.create_adapter(f"t{tenant}", LoraSpec(args.rank, seed=tenant))
    return [
        TrainItem(f"t{tenant}", [datum(length) for length in lengths[tenant :: args.tenants]])
        for tenant in range(args.tenants)
    ]


def loss_of(outcome: object) -> float:
    assert isinstance(outcome, TrainResult), outcome
    return -float(sum(row.sum() for row in outcome.logprobs))


def relative_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(left - right) / abs(right) for left, right in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
