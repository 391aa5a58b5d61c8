"""How often rounding sends tokens to other experts: alone or in company, sampled or trained, in bf16 or in fp32.

Where a router gives two experts nearly the same score, rounding decides which one is chosen. The sequences are random
tokens, or drawn by the sampler, and each has an adapter of its own. For each comparison this prints the share of pairs
of token and layer whose set of experts differs, and the share of tokens that have one in any layer.

    python benchmarks/changed_routes.py --json build/bench/changed_routes.json
    python benchmarks/changed_routes.py --model random://qwen3-moe-tiny --device cpu
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_gpu import machine, make_adapters, random_prompts, run_requests, write_json

from twinkle import Datum, Trainer, TrainItem, TrainResult
from twinkle.model.types import IntArray, RouteArray
from twinkle.sampler import SampleRequest, SamplingParams, TorchSampler


def main() -> None:
    args = parse_arguments()
    trainer = Trainer.from_pretrained(args.model, device=args.device, dtype="bf16", memory_budget_bytes=args.memory)
    names = make_adapters(trainer, args.tenants, args.rank)
    sampler = TorchSampler(trainer, None, max_sequences=args.tenants)
    for name in names:
        sampler.publish(name, name)
    prompts = random_prompts(np.random.default_rng(0), trainer.architecture.vocab_size, [args.prompt] * args.tenants)
    sequences, sampled = draw(args, sampler, names, prompts)
    company = trained(trainer, names, sequences)
    alone = [trained(trainer, [name], [tokens])[0] for name, tokens in zip(names, sequences, strict=True)]
    rows = {"alone and in company": compare(alone, company), "sampled and trained": compare(sampled, company)}
    if args.fp32:
        exact = Trainer.from_pretrained(args.model, device=args.device, dtype="fp32", memory_budget_bytes=args.memory)
        make_adapters(exact, args.tenants, args.rank)
        rows["bf16 and fp32"] = compare(company, trained(exact, names, sequences))
    print(f"\n{args.model}: {sum(map(len, sequences))} tokens, {company[0].shape[1]} layers")
    for name, row in rows.items():
        print(f"{name:22} {100 * row['pairs']:7.3f} % of tokens and layers, {100 * row['tokens']:6.2f} % of tokens")
    arguments = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    write_json(args.json, {"arguments": arguments, "machine": machine(args.device), "rows": rows})


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=f"random://{'qwen3-30b-a3b' if cuda else 'qwen3-moe-tiny'}")
    parser.add_argument("--tenants", type=int, default=8, help="each has one sequence")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--draw", type=int, default=192, help="tokens to draw behind it")
    parser.add_argument("--fp32", action="store_true", help="also compare with a copy of the model in fp32")
    parser.add_argument("--memory", type=int, default=None, metavar="BYTES", help="for each copy of the model")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    for name in ("tenants", "rank", "prompt", "draw"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}, allowed: an integer ≥ 1")
    return args


def draw(
    args: argparse.Namespace, sampler: TorchSampler, names: Sequence[str], prompts: Sequence[IntArray]
) -> tuple[list[IntArray], list[RouteArray]]:
    """Return whole sequences, and the routes of all their tokens but the last, which the sampler recorded."""
    results = run_requests(
        sampler,
        [
            SampleRequest(
                name,
                name,
                prompt,
                SamplingParams(max_tokens=args.draw, temperature=1.0, seed=number, stop_at_eos=False),
                routed_experts=True,
            )
            for number, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        ],
    )
    drawn = [results[name].sequences[0] for name in names]
    routes = [each.routed_experts for each in drawn if each.routed_experts is not None]
    assert len(routes) == len(names), "they were asked for"
    return [np.concatenate([prompt, each.tokens]) for prompt, each in zip(prompts, drawn, strict=True)], routes


def trained(trainer: Trainer, names: Sequence[str], sequences: Sequence[IntArray]) -> list[RouteArray]:
    """Return the routes of sequences, computed in one call."""
    items = [
        TrainItem(name, [Datum(tokens[:-1], tokens[1:])], records_routes=True)
        for name, tokens in zip(names, sequences, strict=True)
    ]
    routes: list[RouteArray] = []
    for result in trainer.forward(items):
        assert isinstance(result, TrainResult), result
        routes += result.routes
    return routes


def compare(ours: Sequence[RouteArray], theirs: Sequence[RouteArray]) -> dict[str, Any]:
    """Return the shares of pairs of token and layer, and of tokens, that have other experts, in any order."""
    pairs = [(np.sort(left, -1) != np.sort(right, -1)).any(-1) for left, right in zip(ours, theirs, strict=True)]
    changed_TL = np.concatenate(pairs)
    return {"pairs": float(changed_TL.mean()), "tokens": float(changed_TL.any(1).mean())}


if __name__ == "__main__":
    main()
