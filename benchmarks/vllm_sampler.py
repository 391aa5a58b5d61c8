"""Speed of the vLLM sampler beside vLLM itself, with the same engine arguments, weights, adapters and requests.

Measures tokens per second. Every request draws exactly ``--tokens`` tokens at temperature 1 with a seed of its own and
reports their log-probabilities, as the sampler always does. vLLM runs first, alone, in another process. Two more
numbers: the time that publishing a version takes, and the time from publishing to the version's first token, beside
that of the same request on a known version.

    python benchmarks/vllm_sampler.py --model 1b --requests 1 32 256 --json build/bench/vllm_sampler.json

The interpreter needs vLLM. ``--engine-args`` are vLLM's own, as JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twinkle import AdamParams, Datum, LoraSpec, Trainer, TrainItem
from twinkle.sampler import Finished, SampleFailure, SampleRequest, SamplingParams
from twinkle.sampler.vllm import VllmSampler
from twinkle.sampler.vllm.base_folder import base_folder

MODELS = {"tiny": "random://llama-tiny-wide", "1b": "random://llama-1b", "8b": "random://llama-8b"}
VLLM_SCRIPT = Path(__file__).parent / "sampling_vllm.py"


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        trainer = Trainer.from_pretrained(
            MODELS[args.model], device=args.device, dtype=args.dtype, memory_budget_bytes=int(args.trainer_gib * 2**30)
        )
        prompts = make_prompts(max(args.requests), trainer.architecture.vocab_size)
        adapter_dirs = [train(trainer, args, number, prompts[0], scratch) for number in range(args.adapters)]
        engine_args = {
            "max_loras": args.adapters,
            "max_lora_rank": max(8, args.rank),
            "max_num_seqs": max(64, *args.requests),
            "max_model_len": 1024,
            **json.loads(args.engine_args),
        }
        if not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & engine_args.keys():
            memory = {"gpu_memory_utilization": 0.5} if args.device == "cuda" else {"kv_cache_memory_bytes": 2**30}
            engine_args |= memory
        report: dict[str, Any] = {"model": args.model, "dtype": args.dtype, "engine_args": engine_args, "rows": []}
        plain = dict.fromkeys(args.requests, float("nan"))
        if args.plain:
            with base_folder(trainer, scratch) as folder:
                plain = vllm_rates(args, folder, adapter_dirs, prompts, engine_args)
        ours = Ours(args, trainer, engine_args)
        for count in args.requests:
            row = {"requests": count, "ours": ours.rate(prompts[:count]), "vllm": plain[count]}
            report["rows"].append(row)
            print(f"{count:>6} requests: ours {row['ours']:10.1f}, vLLM {row['vllm']:10.1f} tokens/s", flush=True)
        report |= ours.publishing(prompts[0])
        print(json.dumps({name: report[name] for name in ("publish_ms", "first_token_ms", "known_ms")}))
        ours.sampler.close()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256], help="number of simultaneous requests")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to draw per request")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trainer-gib", type=float, default=24.0 if torch.cuda.is_available() else 1.0)
    parser.add_argument("--engine-args", default="{}", metavar="JSON")
    parser.add_argument("--no-plain", action="store_false", dest="plain", help="skip vLLM itself")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


class Ours:
    """The vLLM sampler with one version for each adapter."""

    def __init__(self, args: argparse.Namespace, trainer: Trainer, engine_args: dict[str, object]) -> None:
        self.args = args
        self.sampler = VllmSampler(trainer, None, engine_args=engine_args)
        print(self.sampler.memory, flush=True)
        for number in range(args.adapters):
            self.sampler.publish(f"v{number}", f"a{number}")

    def rate(self, prompts: Sequence[np.ndarray]) -> float:
        self._generate(prompts, 4)
        seconds = statistics.median(self._generate(prompts, self.args.tokens) for _ in range(self.args.repeats))
        return len(prompts) * self.args.tokens / seconds

    def publishing(self, prompt: np.ndarray) -> dict[str, float]:
        """Return the milliseconds of publishing, from publishing to a first token, and to that of a known version."""
        times: dict[str, list[float]] = {"publish_ms": [], "first_token_ms": [], "known_ms": []}
        for number in range(self.args.repeats + 1):
            started = time.perf_counter()
            self._generate([prompt], 1)
            known = time.perf_counter()
            self.sampler.publish(f"new-{number}", "a0")
            published = time.perf_counter()
            self._generate([prompt], 1, f"new-{number}")
            first = time.perf_counter()
            self.sampler.retire(f"new-{number}")
            if number:
                times["known_ms"].append(1000 * (known - started))
                times["publish_ms"].append(1000 * (published - known))
                times["first_token_ms"].append(1000 * (first - known))
        return {name: statistics.median(values) for name, values in times.items()}

    def _generate(self, prompts: Sequence[np.ndarray], tokens: int, version: str | None = None) -> float:
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=number, stop_at_eos=False)
            chosen = version or f"v{number % self.args.adapters}"
            self.sampler.submit(SampleRequest(str(number), chosen, prompt, params))
        finished = 0
        while self.sampler.busy:
            for event in self.sampler.step():
                assert isinstance(event, Finished), "nothing is streamed here"
                if isinstance(event.outcome, SampleFailure):
                    raise event.outcome.error
                assert len(event.outcome.sequences[0].tokens) == tokens
                finished += 1
        assert finished == len(prompts)
        return time.perf_counter() - started


def train(trainer: Trainer, args: argparse.Namespace, number: int, tokens: np.ndarray, scratch: Path) -> Path:
    """Train an adapter for a few steps, so that its B is not zero, and return the folder with its weights."""
    name = f"a{number}"
    trainer.create_adapter(name, LoraSpec(rank=args.rank, seed=number))
    for _ in range(2):
        trainer.forward_backward([TrainItem(name, [Datum(tokens[:-1], tokens[1:])])])
        trainer.optim_step(name, AdamParams(learning_rate=1e-3))
    trainer.save(name, scratch / name, optimizer=False)
    return scratch / name


def vllm_rates(
    args: argparse.Namespace,
    folder: Path,
    adapter_dirs: Sequence[Path],
    prompts: Sequence[np.ndarray],
    engine_args: dict[str, object],
) -> dict[int, float]:
    """Measure vLLM itself in another process, so that its memory is free again afterwards."""
    on_cpu = {"enforce_eager": True} if args.device == "cpu" else {}
    task = {
        "model": str(folder),
        "adapters": [str(directory) for directory in adapter_dirs],
        "prompts": [prompt.tolist() for prompt in prompts],
        "requests": args.requests,
        "tokens": args.tokens,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[args.dtype],
        "engine_args": {**engine_args, **on_cpu, "skip_tokenizer_init": True},
        "repeats": args.repeats,
        "seeded": args.device == "cuda",  # on a CPU, vLLM's engine dies of seeds when it computes a prompt in parts
    }
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    done = subprocess.run(
        [sys.executable, VLLM_SCRIPT], input=json.dumps(task), capture_output=True, text=True, check=False, env=quiet
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"rates"')]
    if done.returncode != 0 or not answers:  # vLLM's processes also write to stdout
        raise SystemExit(f"vLLM failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return dict(zip(args.requests, json.loads(answers[-1])["rates"], strict=True))


def make_prompts(count: int, vocab_size: int) -> list[np.ndarray]:
    """Return prompts of 16 to 47 tokens."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, min(256, vocab_size), generator.integers(16, 48)) for _ in range(count)]


if __name__ == "__main__":
    main()
