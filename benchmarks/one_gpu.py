"""Shared by the parts of compare_h200.py: models, adapters, requests to a sampler, the description of a machine."""

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from multi_tenant import noise

from twinkle import LoraSpec, Trainer
from twinkle.sampler import Finished, SampleFailure, Sampler, SampleRequest, SampleResult

# "tiny" is for a CPU. It is the wide one because vLLM on a CPU supports no heads narrower than 32.
MODELS = {"tiny": "random://llama-tiny-wide", "1b": "random://llama-1b", "8b": "random://llama-8b"}
_B_SCALE = 0.2  # factor of noise(), whose standard deviation is 0.01


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", choices=MODELS, default="1b" if cuda else "tiny")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if cuda else "fp32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")


def make_adapters(trainer: Trainer, count: int, rank: int) -> list[str]:
    """Create adapters without LoRA on the head. Their B is not zero, because a sampler may skip LoRA without effect."""
    names = [f"a{number}" for number in range(count)]
    for number, name in enumerate(names):
        trainer.create_adapter(name, LoraSpec(rank, seed=number, train_unembed=False))
        snapshot = trainer.snapshot(name)
        weights = torch.from_numpy(snapshot.weights)
        filled = torch.where(weights == 0, _B_SCALE * noise(len(weights)), weights)
        trainer.restore(name, dataclasses.replace(snapshot, weights=filled.numpy()))
    return names


def random_prompts(generator: np.random.Generator, vocabulary: int, lengths: Iterable[int]) -> list[np.ndarray]:
    return [generator.integers(0, vocabulary, length) for length in lengths]


def run_requests(sampler: Sampler, requests: Iterable[SampleRequest]) -> dict[str, SampleResult]:
    """Submit all requests, wait for their results, and check that every sample has as many tokens as it may have."""
    wanted: dict[str, int | None] = {}
    for request in requests:
        sampler.submit(request)
        wanted[request.request_id] = request.params.max_tokens
    results: dict[str, SampleResult] = {}
    while sampler.busy:
        for event in sampler.step():
            assert isinstance(event, Finished), "nothing is streamed here"
            if isinstance(event.outcome, SampleFailure):
                raise event.outcome.error
            results[event.request_id] = event.outcome
    for name, tokens in wanted.items():
        assert all(len(sequence.tokens) == tokens for sequence in results[name].sequences), f"{name} ended early"
    return results


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def machine(device: str) -> dict[str, Any]:
    cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
        "cuda": torch.version.cuda,
        "host": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    """Return the name of the host's processor, on which the time of small passes depends."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report, so that the file is never half written when the process is killed."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".new")
        unfinished.write_text(json.dumps(report, indent=2) + "\n")
        unfinished.replace(path)
