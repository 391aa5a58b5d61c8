"""Time of one decode step of the torch sampler on CUDA, with and without adapters, and the kernels it consists of.

A step draws one token for each of ``--rows`` sequences of ``--length`` tokens with the captured graphs: the pass, the
draw, and nothing of the host's work between passes. The rows of the adapters follow each other, as in the sampler.

    python benchmarks/decode_step.py --model 8b --rows 1 32 256 512 --length 384
    python benchmarks/decode_step.py --model 8b --rows 256 --kernels 25
"""

import argparse
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from one_gpu import MODELS, machine, write_json
from torch.profiler import ProfilerActivity, profile

from twinkle import LoraSpec, Trainer
from twinkle.model.adapters.adapter import Adapter
from twinkle.sampler import TorchSampler
from twinkle.sampler.torch_sampler.cache import blocks_for
from twinkle.sampler.torch_sampler.decode_graphs import DecodeGraphs, DecodeRow
from twinkle.sampler.torch_sampler.drawing import Draw

STEPS = 8


def main() -> None:
    args = parse_arguments()
    trainer = Trainer.from_pretrained(MODELS[args.model], device="cuda", dtype="bf16")
    sampler = TorchSampler(trainer, None, max_sequences=max(args.rows))
    print(trainer.memory, sampler.memory, sep="\n")
    graphs = sampler._graphs
    assert graphs is not None, "decoding was not captured; the log says why"
    print("fused layers:", graphs.fused)
    versions = [version(trainer, f"a{number}", args.rank) for number in range(args.adapters)]
    trainer.pool.make_resident(versions)
    report = []
    for rows in args.rows:
        case = Case(trainer, sampler, graphs, rows, args.length)
        plain, lora = (statistics.median(case.step_ms(each) for _ in range(args.repeats)) for each in ([], versions))
        report.append({"rows": rows, "base_ms": plain, "lora_ms": lora, "lora_cost": 1 - plain / lora})
        print(f"{rows:4} rows: {plain:6.2f} ms, with {args.adapters} adapters {lora:6.2f} ms ({lora / plain - 1:+.1%})")
        if args.kernels:
            for name, which in (("base", []), ("lora", versions)):
                print(f"  {name}:")
                case.print_kernels(which, args.kernels)
    write_json(args.json, {"machine": machine("cuda"), "rows": report})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 512])
    parser.add_argument("--length", type=int, default=384, help="tokens of each sequence")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=0, help="print this many of the longest kernels of a step")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


def version(trainer: Trainer, name: str, rank: int) -> Adapter:
    """Return a frozen adapter with random weights."""
    trainer.create_adapter(name, LoraSpec(rank=rank, seed=1))
    frozen = trainer.pool.freeze(name)
    trainer.remove_adapter(name)
    return frozen


class Case:
    """Sequences of one length, each with its own blocks, and their random numbers."""

    def __init__(self, trainer: Trainer, sampler: TorchSampler, graphs: DecodeGraphs, rows: int, length: int) -> None:
        assert sampler._cache is not None
        each, capacity = blocks_for(length + STEPS), sampler._cache.capacity
        self._graphs = graphs
        self._choices = trainer.architecture.vocab_size
        self._rows = [
            DecodeRow(5, length - 1, [2 + (row * each + block) % capacity for block in range(each)])
            for row in range(rows)
        ]
        self._draws = [Draw(1.0, 0, 1.0, 0.0)] * rows
        self._uniform = torch.from_numpy(np.random.default_rng(0).random((rows, STEPS))).cuda()

    @torch.no_grad()
    def run(self, versions: list[Adapter]) -> None:
        """Take ``STEPS`` steps."""
        parts = np.array_split(np.arange(len(self._rows)), len(versions) or 1)
        runs = [(one, len(part)) for one, part in zip(versions or [None], parts, strict=True) if len(part)]
        self._graphs.decode(self._rows, runs, self._draws, self._uniform, self._choices)

    def step_ms(self, versions: list[Adapter]) -> float:
        self.run(versions)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(4):
            self.run(versions)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 4 / STEPS

    def print_kernels(self, versions: list[Adapter], most: int) -> None:
        """Print the longest kernels of a step: milliseconds and launches a step."""
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.run(versions)
            torch.cuda.synchronize()
        times: Counter[str] = Counter()
        launches: Counter[str] = Counter()
        for event in profiled.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name[:100]] += event.device_time / 1000 / STEPS
                launches[event.name[:100]] += 1
        print(f"    {sum(times.values()):7.3f} ms in {sum(launches.values()) / STEPS:.0f} kernels")
        for name, milliseconds in times.most_common(most):
            print(f"    {milliseconds:7.3f} ms {launches[name] / STEPS:6.1f} × {name}")


if __name__ == "__main__":
    main()
