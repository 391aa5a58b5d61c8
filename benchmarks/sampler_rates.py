"""Tokens per second of one sampler at several numbers of concurrent requests, and the cost of LoRA.

The engines, each alone on its device, with the same prompts and adapters of the same shape:

    torch         the torch sampler
    vllm-sampler  our vLLM sampler (sampler_type vllm), beside a trainer that holds the same model
    vllm          vLLM itself: with the log-probability of each drawn token, as our samplers return it; without it
                  (one repeat); and, with --vllm-seeds, with it and a seed for each request (one repeat)

Every request draws exactly --tokens tokens at temperature 1 after a prompt of 16 to 47 tokens. No prompt is used twice,
so prefix caches have no effect. Rates are medians of --repeats after a warm-up. The time to publish is that from
publishing a version to the first token of a request with it, beside that of the same request with a known version. For
vLLM itself, publishing is the first use of an adapter whose files are already there.

--lora-cost measures something else, with the torch sampler only: the rate with adapters and with the base model, and
the time of one decode step of several sequences with prompts of --prompt tokens each. For the latter, the prompts are
computed once, so that requests find them in the cache; a step is then the difference of two runs with more and fewer
tokens, divided by the number of tokens.

    python benchmarks/sampler_rates.py --engine torch --model 8b --json build/bench/torch_sampler.json
    python benchmarks/sampler_rates.py --engine torch --model 8b --lora-cost --requests 256
"""

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
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
from safetensors.torch import save_file
from transformers import AutoConfig

from twinkle import Trainer, hub
from twinkle.sampler import Sampler, SampleRequest, SamplingParams, TorchSampler

WARM_UP_TOKENS = 16
PROMPT_LENGTHS = (16, 48)
# Our vLLM sampler's trainer and vLLM's engine divide the GPU by these shares.
TRAINER_SHARE, ENGINE_SHARE = 0.3, 0.55
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Prompts = list[np.ndarray]


class Measured(Protocol):
    """An engine as this benchmark uses it."""

    memory: str

    def generate(self, prompts: Prompts, tokens: int) -> None:
        """Draw exactly ``tokens`` tokens for each prompt."""

    def variants(self) -> dict[str, Callable[[Prompts, int], None]]:
        """Return further ways to generate, by the name of their column."""

    def first_token(self, prompt: np.ndarray, *, new: bool) -> dict[str, float]:
        """Return the seconds of a request for one token, and of publishing its version if that is new."""


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    with engine(args) as measured:
        report: dict[str, Any] = {
            "engine": args.engine,
            "model": args.model,
            "dtype": args.dtype,
            "adapters": args.adapters,
            "rank": args.rank,
            "tokens": args.tokens,
            "repeats": args.repeats,
            "machine": machine(args.device),
            "memory": measured.memory,
            "start_s": time.perf_counter() - started,
        }
        print(f"start-up {report['start_s']:.1f} s; {measured.memory}", flush=True)
        if args.lora_cost:
            assert isinstance(measured, Ours)
            lora_cost(args, measured, report)
        else:
            rates(args, measured, report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--engine", choices=("torch", "vllm-sampler", "vllm"), default="torch")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256, 512], help="concurrent requests")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to draw per request")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--vllm-seeds", action="store_true", help="also measure vLLM with a seed for each request")
    parser.add_argument("--lora-cost", action="store_true", help="measure the cost of LoRA instead")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256, 512], help="of a decode step")
    parser.add_argument("--prompt", type=int, default=256, help="tokens per prompt of a decode step")
    parser.add_argument("--decode-steps", type=int, default=48, help="decode steps that are timed together")
    parser.add_argument(
        "--memory-dir", type=Path, default=None, help="for files of our vLLM sampler: the base model and the versions"
    )
    args = parser.parse_args()
    if args.lora_cost and args.engine != "torch":
        parser.error(f"--lora-cost: got --engine {args.engine}, allowed: torch")
    return args


# --- engines ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine(args: argparse.Namespace) -> Iterator[Measured]:
    if args.engine == "vllm":
        with tempfile.TemporaryDirectory() as directory:
            yield Vllm(args, Path(directory))
    elif args.engine == "vllm-sampler":
        with our_vllm_sampler(args) as (trainer, sampler):
            yield Ours(args, trainer, sampler)
    else:
        trainer = Trainer.from_pretrained(MODELS[args.model], device=args.device, dtype=args.dtype)
        most = max([*args.requests, *(args.sequences if args.lora_cost else ())])
        yield Ours(args, trainer, TorchSampler(trainer, None, max_sequences=max(64, most)))


@contextlib.contextmanager
def our_vllm_sampler(args: argparse.Namespace) -> Iterator[tuple[Trainer, Sampler]]:
    from twinkle.sampler.vllm import VllmSampler

    cuda = args.device.startswith("cuda")
    options: dict[str, Any] = {
        "max_loras": args.adapters,
        "max_lora_rank": args.rank,
        "max_num_seqs": max(64, *args.requests),
        "max_model_len": 1024,
        "enable_prefix_caching": False,
    }
    budget = 2**31
    if cuda:
        options["gpu_memory_utilization"] = ENGINE_SHARE
        budget = int(TRAINER_SHARE * torch.cuda.mem_get_info()[1])
    trainer = Trainer.from_pretrained(
        MODELS[args.model], device=args.device, dtype=args.dtype, memory_budget_bytes=budget
    )
    sampler = VllmSampler(trainer, None, engine_args=options, memory_dir=memory_dir(args, trainer))
    try:
        yield trainer, sampler
    finally:
        sampler.close()


def memory_dir(args: argparse.Namespace, trainer: Trainer) -> Path:
    """Return --memory-dir, else /dev/shm where it has room for the model, else the directory of temporary files."""
    shared, needed = Path("/dev/shm"), trainer.memory.weights + 2**32
    if args.memory_dir is not None:
        return args.memory_dir
    if shared.is_dir() and shutil.disk_usage(shared).free > needed:
        return shared
    return Path(tempfile.gettempdir())


class Ours:
    """A sampler of ours, with published adapters."""

    def __init__(self, args: argparse.Namespace, trainer: Trainer, sampler: Sampler) -> None:
        self._device = args.device
        self._sampler = sampler
        self._numbers = count()
        self.memory: str = sampler.memory
        self._adapters = make_adapters(trainer, args.adapters, args.rank)
        self._versions = [f"v-{name}" for name in self._adapters]
        for version, name in zip(self._versions, self._adapters, strict=True):
            sampler.publish(version, name)

    def generate(self, prompts: Prompts, tokens: int) -> None:
        versions = [self._versions[number % len(self._versions)] for number in range(len(prompts))]
        self._run(prompts, versions, tokens)

    def generate_with_base(self, prompts: Prompts, tokens: int) -> None:
        self._run(prompts, [None] * len(prompts), tokens)

    def variants(self) -> dict[str, Callable[[Prompts, int], None]]:
        return {}

    def first_token(self, prompt: np.ndarray, *, new: bool) -> dict[str, float]:
        synchronize(self._device)
        started = published = time.perf_counter()
        version = self._versions[0]
        if new:
            version = f"new-{next(self._numbers)}"
            self._sampler.publish(version, self._adapters[0])
            published = time.perf_counter()
        self._run([prompt], [version], 1)
        done = time.perf_counter()
        if new:
            self._sampler.retire(version)
        return {"total": done - started, "publish": published - started}

    def _run(self, prompts: Prompts, versions: Sequence[str | None], tokens: int) -> None:
        requests = [
            SampleRequest(
                str(number),
                version,
                prompt,
                SamplingParams(max_tokens=tokens, temperature=1.0, seed=number, stop_at_eos=False),
            )
            for number, (prompt, version) in enumerate(zip(prompts, versions, strict=True))
        ]
        run_requests(self._sampler, requests)


class Vllm:
    """vLLM itself, with adapters of random weights."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        from sampling_vllm import VARIANTS, PlainVllm

        local = hub.resolve(MODELS[args.model])
        self._plain = PlainVllm(
            str(local.path),
            write_adapters(local.path, directory, args.adapters, args.rank),
            rank=args.rank,
            dtype=args.dtype,
            cuda=args.device.startswith("cuda"),
            random_weights=local.random_seed is not None,
            max_requests=max(args.requests),
        )
        self._others = [name for name in VARIANTS if name == "plain" or (name == "seeded" and args.vllm_seeds)]
        import vllm

        self.memory = f"vLLM {vllm.__version__}"

    def generate(self, prompts: Prompts, tokens: int) -> None:
        self._plain.generate([prompt.tolist() for prompt in prompts], tokens)

    def variants(self) -> dict[str, Callable[[Prompts, int], None]]:
        def variant(name: str) -> Callable[[Prompts, int], None]:
            return lambda prompts, tokens: self._plain.generate([each.tolist() for each in prompts], tokens, name)

        return {name: variant(name) for name in self._others}

    def first_token(self, prompt: np.ndarray, *, new: bool) -> dict[str, float]:
        return {"total": self._plain.first_token(prompt.tolist(), new=new)}


def write_adapters(model: Path, directory: Path, number: int, rank: int) -> list[str]:
    """Write PEFT adapters with random weights on all linear layers but the head. They share one file of weights."""
    config = AutoConfig.from_pretrained(model)
    heads, width, inner = config.num_attention_heads * config.head_dim, config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * config.head_dim
    shapes = {  # (in, out)
        "self_attn.q_proj": (width, heads),
        "self_attn.k_proj": (width, keys),
        "self_attn.v_proj": (width, keys),
        "self_attn.o_proj": (heads, width),
        "mlp.gate_proj": (width, inner),
        "mlp.up_proj": (width, inner),
        "mlp.down_proj": (inner, width),
    }
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(config.num_hidden_layers):
        for name, (wide, out) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, wide, generator=generator) * wide**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.002
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, directory / "weights.safetensors")
    peft = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    peft |= {"target_modules": list(PROJECTIONS), "base_model_name_or_path": ""}
    folders = [directory / f"a{each}" for each in range(number)]
    for folder in folders:
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(peft))
        (folder / "adapter_model.safetensors").hardlink_to(directory / "weights.safetensors")
    return [str(folder) for folder in folders]


# --- measuring --------------------------------------------------------------------------------------------------------


class FreshPrompts:
    """Makes prompts that differ from all earlier ones. From one seed every engine gets the same, in the same order."""

    def __init__(self, args: argparse.Namespace, seed: int = 0) -> None:
        self._vocabulary = AutoConfig.from_pretrained(hub.resolve(MODELS[args.model]).path).vocab_size
        self._random = np.random.default_rng(seed)

    def make(self, number: int) -> Prompts:
        return random_prompts(self._random, self._vocabulary, self._random.integers(*PROMPT_LENGTHS, number))

    def of_length(self, number: int, length: int) -> Prompts:
        return random_prompts(self._random, self._vocabulary, [length] * number)


def rates(args: argparse.Namespace, measured: Measured, report: dict[str, Any]) -> None:
    fresh, of_variants = FreshPrompts(args), FreshPrompts(args, seed=1)
    report["rows"] = []
    for number in args.requests:
        row: dict[str, Any] = {"requests": number}
        row["tokens_per_s"], row["seconds"] = rate(args, fresh, measured.generate, number, args.repeats)
        for name, generate in measured.variants().items():
            row[name], _ = rate(args, of_variants, generate, number, 1)
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        write_json(args.json, report)
    report["publish"] = publish(args, fresh, measured)
    print(json.dumps(report["publish"]), flush=True)
    write_json(args.json, report)


def rate(
    args: argparse.Namespace,
    fresh: FreshPrompts,
    generate: Callable[[Prompts, int], None],
    number: int,
    repeats: int,
) -> tuple[float, list[float]]:
    """Return tokens per second, and the seconds of each repeat."""
    generate(fresh.make(number), min(WARM_UP_TOKENS, args.tokens))
    seconds = [timed(args, generate, fresh.make(number), args.tokens) for _ in range(repeats)]
    return number * args.tokens / statistics.median(seconds), seconds


def timed(args: argparse.Namespace, generate: Callable[[Prompts, int], None], prompts: Prompts, tokens: int) -> float:
    synchronize(args.device)
    started = time.perf_counter()
    generate(prompts, tokens)
    return time.perf_counter() - started


def publish(args: argparse.Namespace, fresh: FreshPrompts, measured: Measured) -> dict[str, float]:
    """Return medians in milliseconds of requests with new and known versions, in turns, after a warm-up of each."""
    found: dict[str, list[float]] = {}
    for number in range(2 * args.repeats + 1):
        for new in (True, False):
            (prompt,) = fresh.of_length(1, 32)
            taken = measured.first_token(prompt, new=new)
            if number:
                found.setdefault("published_ms" if new else "known_ms", []).append(1000 * taken["total"])
                if new and "publish" in taken:
                    found.setdefault("call_ms", []).append(1000 * taken["publish"])
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {**medians, "latency_ms": medians["published_ms"] - medians["known_ms"]}


def lora_cost(args: argparse.Namespace, measured: Ours, report: dict[str, Any]) -> None:
    """Measure with adapters and with the base model in turns, so that a change of clocks affects both."""
    fresh = FreshPrompts(args)
    kinds = {"lora": measured.generate, "base": measured.generate_with_base}
    report["rows"] = []
    for number in args.requests:
        row: dict[str, Any] = {"requests": number}
        for kind, generate in kinds.items():
            row[kind], _ = rate(args, fresh, generate, number, args.repeats)
        row["lora_over_base"] = row["lora"] / row["base"]
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        write_json(args.json, report)
    report["prompt"] = args.prompt
    report["decode_steps"] = []
    for number in args.sequences:
        row = {"sequences": number}
        for kind, generate in kinds.items():
            row[f"{kind}_ms"] = decode_step_ms(args, generate, fresh.of_length(number, args.prompt))
        row["lora_over_base"] = row["lora_ms"] / row["base_ms"]
        report["decode_steps"].append(row)
        print(json.dumps(row), flush=True)
        write_json(args.json, report)


def decode_step_ms(args: argparse.Namespace, generate: Callable[[Prompts, int], None], prompts: Prompts) -> float:
    """Return the milliseconds of one decode step of all prompts together."""
    generate(prompts, 1)  # from now on the prompts are in the cache
    first = statistics.median(timed(args, generate, prompts, 1) for _ in range(args.repeats))
    seconds = statistics.median(timed(args, generate, prompts, 1 + args.decode_steps) for _ in range(args.repeats))
    return 1000 * (seconds - first) / args.decode_steps


if __name__ == "__main__":
    main()
