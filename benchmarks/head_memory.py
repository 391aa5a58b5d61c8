"""Peak memory and time of the chunked head against full logits, for log-probabilities and their gradient.

The chunked head needs O(chunk × vocabulary) memory, full logits O(tokens × vocabulary). First, a check that both give
the same log-probabilities and gradients. On CPU the peak is that of the whole process, so each variant runs in its own
process.

    python benchmarks/head_memory.py --tokens 1024 2048 4096 --json build/bench/head_memory.json
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.model.decoder.head import ChunkedHead, HeadSpec
from twinkle.model.trainer.memory import head_chunk_rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    args = parse_arguments()
    check(args)
    context = multiprocessing.get_context("spawn")
    rows = []
    print(f"vocabulary {args.vocab}, hidden {args.hidden}, {args.dtype}, {args.device}")
    print(f"{'tokens':>8} {'head':>8} {'time':>10} {'extra memory':>14}")
    for tokens in args.tokens:
        for variant in ("chunked", "full"):
            with context.Pool(1) as pool:
                seconds, extra = pool.apply(measure, (args, variant, tokens))
            rows.append({"tokens": tokens, "variant": variant, "seconds": seconds, "extra_bytes": extra})
            print(f"{tokens:8} {variant:>8} {1000 * seconds:7.0f} ms {extra / 2**20:10.0f} MiB", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "torch": torch.__version__,
            "vocab": args.vocab,
            "hidden": args.hidden,
            "dtype": args.dtype,
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


def make_inputs(args: argparse.Namespace, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(args.device).manual_seed(0)
    options = {"generator": generator, "device": args.device}
    hidden_TH = torch.randn(tokens, args.hidden, **options).to(DTYPES[args.dtype])
    weight_VH = (torch.randn(args.vocab, args.hidden, **options) * args.hidden**-0.5).to(DTYPES[args.dtype])
    targets_T1 = torch.randint(0, args.vocab, (tokens, 1), **options)
    coefficients_T1 = torch.randn(tokens, 1, **options)
    return hidden_TH, weight_VH, targets_T1, coefficients_T1


def chunked(hidden_TH: Tensor, weight_VH: Tensor, targets_T1: Tensor, coefficients_T1: Tensor) -> tuple[Tensor, Tensor]:
    head = ChunkedHead(HeadSpec(weight_VH), head_chunk_rows(hidden_TH.device, len(weight_VH)))
    with torch.no_grad():
        return head.logprobs_and_gradient(hidden_TH, targets_T1, lambda start, stop, _: coefficients_T1[start:stop])


def full(hidden_TH: Tensor, weight_VH: Tensor, targets_T1: Tensor, coefficients_T1: Tensor) -> tuple[Tensor, Tensor]:
    hidden_TH = hidden_TH.detach().requires_grad_()
    logits_TV = F.linear(hidden_TH, weight_VH).float()
    logprobs_T1 = logits_TV.log_softmax(-1).gather(1, targets_T1)
    logprobs_T1.backward(coefficients_T1)
    assert hidden_TH.grad is not None
    return logprobs_T1.detach(), hidden_TH.grad


VARIANTS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"chunked": chunked, "full": full}


def check(args: argparse.Namespace) -> None:
    inputs = make_inputs(args, 200)
    (ours, our_gradient), (theirs, their_gradient) = chunked(*inputs), full(*inputs)
    tolerance = 1e-5 if args.dtype == "fp32" else 5e-2
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max(), "log-probabilities differ"
    assert (our_gradient - their_gradient).norm() <= tolerance * their_gradient.norm(), "gradients differ"


def measure(args: argparse.Namespace, variant: str, tokens: int) -> tuple[float, int]:
    """Return the median seconds of five runs, and the peak memory above what was in use before them."""
    inputs = make_inputs(args, tokens)
    VARIANTS[variant](*(x[:16] if x.shape[0] == tokens else x for x in inputs))  # warm-up: loads libraries
    before = start_counting(args.device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        VARIANTS[variant](*inputs)
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), peak_bytes(args.device) - before


def start_counting(device: str) -> int:
    """Reset the peak, which includes making the inputs and could hide a smaller one. Returns the bytes in use now."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return process_bytes("VmRSS")


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else process_bytes("VmHWM")


def process_bytes(field: str) -> int:
    """Return a size from /proc/self/status (Linux; its unit is KiB)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
