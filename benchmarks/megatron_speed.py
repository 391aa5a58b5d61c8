"""Training many tenants in one process with the Megatron backend, compared with our Transformers backend.

Both trainers run in one process, one after the other, with the same tenants and the same sequences. Each has the whole
device, so that neither has to divide its batch. A step is one fused forward and backward pass of all tenants, and an
AdamW step of each. Each pair is measured with eager layers, then with compiled ones. The losses and gradients of their
first passes are compared. Times are medians after a warm-up.

    python benchmarks/megatron_speed.py --json build/bench/megatron_speed.json
    python benchmarks/megatron_speed.py --model random://llama-tiny --tenants 2 --len 16 --repeats 2 --no-compiled
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_gpu import machine

from twinkle import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.megatron.trainer import load_trainer
from twinkle.model.types import FloatArray

ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
# The largest ‖difference‖ / ‖gradient‖ of a tenant, and the largest relative difference of a loss. In bf16 both round
# at every layer, in different places.
GRADIENT_BOUND = {"fp32": 1e-4, "bf16": 0.1}
LOSS_BOUND = {"fp32": 1e-5, "bf16": 5e-3}
GIB = 2**30
WARM_UPS = 2  # steps


def main() -> None:
    args = parse_arguments()
    tokens = args.tenants * args.seqs * args.length
    print(
        f"{args.model}: {args.tenants} × {args.seqs} × {args.length} = {tokens} tokens, rank {args.rank}, {args.dtype}"
    )
    rows: dict[str, dict[str, Any]] = {}
    for compiled in (False, True) if args.compiled else (False,):
        rows |= measure_pair(args, tokens, compiled)
        release_memory()
    report = {
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "machine": machine(args.device) | {"megatron-core": version("megatron-core")},
        "tokens": tokens,
        "rows": rows,
        "megatron_over_transformers": {
            kind: rows[f"megatron {kind}"]["tokens_per_s"] / rows[f"transformers {kind}"]["tokens_per_s"]
            for kind in ("eager", "compiled")
            if f"megatron {kind}" in rows
        },
    }
    print_table(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random://llama-1b" if cuda else "random://llama-tiny", help="a model id")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--seqs", type=int, default=2, help="sequences per tenant")
    parser.add_argument("--len", type=int, default=512 if cuda else 32, dest="length", help="tokens per sequence")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--dtype", choices=GRADIENT_BOUND, default="bf16" if cuda else "fp32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each trainer")
    parser.add_argument("--no-compiled", action="store_false", dest="compiled", help="eager layers only")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    for name in ("tenants", "seqs", "length", "rank", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}, allowed: an integer ≥ 1")
    return args


def measure_pair(args: argparse.Namespace, tokens: int, compiled: bool) -> dict[str, dict[str, Any]]:
    """Return the rows of both trainers. Each has the whole device: one is freed before the other is loaded."""
    kind = "compiled" if compiled else "eager"
    rows: dict[str, dict[str, Any]] = {}
    results: list[Results] = []
    for name, load in (("transformers", Trainer.from_pretrained), ("megatron", load_trainer)):
        started = time.perf_counter()
        trainer = load(args.model, device=args.device, dtype=args.dtype, compiled=compiled)
        print(f"{name} {kind}: start-up {time.perf_counter() - started:.1f} s; {trainer.memory}", flush=True)
        items = make_items(args, trainer)
        for number in range(args.tenants):  # with B = 0 the gradients of A would be 0
            trainer.create_adapter(f"t{number}", LoraSpec(args.rank, seed=number, init_weights=False))
        results.append(results_of(trainer, items))
        rows[f"{name} {kind}"] = measure(args, trainer, items, tokens)
        del trainer
        release_memory()
    compare(args, *results)
    return rows


def measure(args: argparse.Namespace, trainer: Trainer, items: list[TrainItem], tokens: int) -> dict[str, Any]:
    seconds: list[float] = []
    passes: list[float] = []
    for number in range(args.repeats + WARM_UPS):
        if is_cuda(args) and number == WARM_UPS:
            torch.cuda.reset_peak_memory_stats()
        synchronize(args)
        started = time.perf_counter()
        run(trainer, items)
        synchronize(args)
        passed = time.perf_counter()
        for tenant in range(args.tenants):
            trainer.optim_step(f"t{tenant}", ADAM)
        synchronize(args)
        if number >= WARM_UPS:
            seconds.append(time.perf_counter() - started)
            passes.append(passed - started)
    return {
        "step_s": statistics.median(seconds),
        "forward_backward_s": statistics.median(passes),
        "tokens_per_s": tokens / statistics.median(seconds),
        "steps_s": seconds,
        "memory": str(trainer.memory),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if is_cuda(args) else None,
    }


def make_items(args: argparse.Namespace, trainer: Trainer) -> list[TrainItem]:
    shape = (args.tenants, args.seqs, args.length + 1)
    rows = np.random.default_rng(0).integers(0, trainer.vocabulary_size(), shape)
    return [TrainItem(f"t{number}", [Datum(row[:-1], row[1:]) for row in each]) for number, each in enumerate(rows)]


def run(trainer: Trainer, items: list[TrainItem]) -> list[float]:
    """Run one pass of all tenants, and return their losses."""
    losses = []
    for result in trainer.forward_backward(items):
        assert isinstance(result, TrainResult), result
        losses.append(result.metrics["loss:sum"])
    return losses


@dataclass(frozen=True)
class Results:
    """What a trainer computed in its first pass: the loss and the gradient of each tenant."""

    losses: FloatArray
    gradients: list[FloatArray]


def results_of(trainer: Trainer, items: list[TrainItem]) -> Results:
    losses = np.array(run(trainer, items))
    found = [trainer.gradients(item.adapter_id) for item in items]
    for item in items:
        trainer.zero_grad(item.adapter_id)
    return Results(losses, [np.concatenate([each[name].ravel() for name in sorted(each)]) for each in found])


def compare(args: argparse.Namespace, theirs: Results, ours: Results) -> None:
    """Exit if the two trainers do not compute the same, because then the times would mean nothing."""
    off = float(np.max(np.abs(ours.losses - theirs.losses) / np.abs(theirs.losses)))
    pairs = zip(theirs.gradients, ours.gradients, strict=True)
    away = max(float(np.linalg.norm(mine - other) / np.linalg.norm(other)) for other, mine in pairs)
    print(f"the trainers differ by {away:.1e} in a gradient and by {off:.1e} in a loss, at most", flush=True)
    if not (away <= GRADIENT_BOUND[args.dtype] and off <= LOSS_BOUND[args.dtype]):
        raise SystemExit(f"allowed are {GRADIENT_BOUND[args.dtype]:.0e} and {LOSS_BOUND[args.dtype]:.0e}")


def is_cuda(args: argparse.Namespace) -> bool:
    return str(args.device).startswith("cuda")


def synchronize(args: argparse.Namespace) -> None:
    if is_cuda(args):
        torch.cuda.synchronize()


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_table(report: Mapping[str, Any]) -> None:
    print(f"\n{'':24} {'step':>10} {'fwd+bwd':>10} {'tokens/s':>10}")
    for name, row in report["rows"].items():
        step, passed = 1000 * row["step_s"], 1000 * row["forward_backward_s"]
        print(f"{name:24} {step:7.1f} ms {passed:7.1f} ms {row['tokens_per_s']:10.0f}")
    for kind, ratio in report["megatron_over_transformers"].items():
        print(f"megatron over transformers, {kind}: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
