"""Time from a request to its first token on CUDA, for prompts that arrive together, with and without captured graphs.

Every request draws one token, so the time is that of the prompt passes and the host's work around them. The prompts
differ in every repetition, so that none is found in the cache. GPU time and kernels are those of one repetition.

    python benchmarks/prompt_pass.py --model 1b --prompts 1 4 16 64 --length 256
    python benchmarks/prompt_pass.py --model 1b --prompts 1 --length 256 --kernels 25
"""

import argparse
import statistics
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from one_gpu import MODELS, machine, write_json
from torch.profiler import ProfilerActivity, profile

from twinkle import LoraSpec, Trainer
from twinkle.sampler import SampleRequest, SamplingParams, TorchSampler
from twinkle.sampler.torch_sampler.model_pass import ModelPass


def main() -> None:
    args = parse_arguments()
    trainer = Trainer.from_pretrained(MODELS[args.model], device="cuda", dtype="bf16")
    started = time.perf_counter()
    sampler = TorchSampler(trainer, None)
    print(f"{sampler.memory}; captured in {time.perf_counter() - started:.1f} s")
    assert sampler._prompts is not None, "prompts were not captured; the log says why"
    for number in range(args.adapters):
        trainer.create_adapter(f"a{number}", LoraSpec(rank=args.rank, seed=number))
        sampler.publish(f"a{number}", f"a{number}")
    report = []
    for captured in (True, False):
        if not captured:
            sampler._pass = ModelPass(trainer.engine, sampler._cache, sampler._graphs)
        for count in args.prompts:
            case = Case(sampler, count, args)
            wall = statistics.median(case.seconds() for _ in range(args.repeats + 2))
            kernels = case.kernels()
            gpu = sum(micros for micros, _ in kernels.values()) / 1e3
            launches = sum(launched for _, launched in kernels.values())
            row = {"captured": captured, "prompts": count, "wall_ms": wall * 1e3, "gpu_ms": gpu, "kernels": launches}
            report.append(row)
            how = "graphs" if captured else "plain"
            print(f"{count:4} × {args.length}, {how:6}: {wall * 1e3:7.1f} ms, GPU {gpu:7.1f} ms, {launches} kernels")
            for name, (micros, launched) in sorted(kernels.items(), key=lambda each: -each[1][0])[: args.kernels]:
                print(f"      {micros / 1e3:7.2f} ms {launched:5} × {name[:90]}")
    write_json(args.json, {"machine": machine("cuda"), "rows": report})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 4, 16, 64], help="prompts at the same time")
    parser.add_argument("--length", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kernels", type=int, default=0, help="print this many of the longest kernels")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


class Case:
    """Some prompts that arrive together, one adapter after the other."""

    def __init__(self, sampler: TorchSampler, count: int, args: argparse.Namespace) -> None:
        self.sampler = sampler
        self.count = count
        self.args = args
        self.random = np.random.default_rng(count)

    def run(self) -> None:
        for number in range(self.count):
            tokens = self.random.integers(10, 1000, self.args.length)
            params = SamplingParams(max_tokens=1, temperature=1.0, seed=number, stop_at_eos=False)
            version = f"a{number % self.args.adapters}" if self.args.adapters else None
            self.sampler.submit(SampleRequest(str(number), version, tokens, params))
        while self.sampler.busy:
            self.sampler.step()

    def seconds(self) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.run()
        return time.perf_counter() - started

    def kernels(self) -> dict[str, tuple[float, int]]:
        """Return the microseconds and launches of each kernel in one repetition."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.run()
            torch.cuda.synchronize()
        micros: Counter[str] = Counter()
        launches: Counter[str] = Counter()
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                micros[event.name] += event.device_time
                launches[event.name] += 1
        return {name: (float(total), launches[name]) for name, total in micros.items()}


if __name__ == "__main__":
    main()
