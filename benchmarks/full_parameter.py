"""Training all parameters of a model, compared with plain torch + Transformers, and giving the weights to a sampler.

The columns take turns, step by step, on the same sequences, with the same causal attention, and with the same AdamW
after the gradient was clipped. All sequences have the same length, so that plain Transformers needs no padding:

    ours         our FullTrainer: the model computes in --dtype; weights, moments and gradient are fp32
    plain        Transformers and autograd, with the same fp32 weights and moments
    plain half   the same with everything in bf16, which rounds every update; only with --dtype bf16

Before the timing, our loss and gradient are compared with those of ``plain``. Times are medians after a warm-up. The
peak of a column is what its own model, state and activations take at most; it is measured on CUDA only.

Then weights go to the torch sampler after each of a few steps, and the log-probabilities of sampler and trainer are
compared:

    server       as the server does it: a copy of the FullTrainer's weights, in memory that was taken at the start
    library      CheckpointEngineManager, from a TransformersModel with fp32 weights; the sampler computes in --dtype,
                 and in fp32 it shares the model's weights
    shared       the same from a TransformersModel with bf16 weights, which are shared; only with --dtype bf16

``sync`` is the median time of one synchronisation after the first. ``sampler`` is the memory that the sampler holds
beside its cache: weights of its own and captured graphs. ``peak`` is the memory that one synchronisation takes above
all that while it runs. Memory is measured on CUDA only.

    python benchmarks/full_parameter.py --model random://llama-tiny --batch 4 --len 64 --dtype fp32
    python benchmarks/full_parameter.py --model random://llama-1b --json build/bench/full_parameter.json
"""

import argparse
import gc
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twinkle import AdamParams, Datum, Trainer, TrainItem, TrainResult, hub
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams as LibraryParams
from twinkle.model import FullSpec, FullTrainer, TransformersModel
from twinkle.sampler import (
    LocalSampler,
    SampleFailure,
    SampleRequest,
    SamplingParams,
    TorchSampler,
)
from twinkle.sampler.weight_sets import WeightVersions

RUN = "run"
ADAM = AdamParams(learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# ‖difference‖ / ‖gradient‖ of ours and plain, and the relative difference of the losses. In bf16 both round at every
# layer, in different places.
GRADIENT_BOUND = {"fp32": 1e-4, "bf16": 0.1}
LOSS_BOUND = {"fp32": 1e-5, "bf16": 1e-3}
# The mean difference of the log-probabilities of a few tokens between sampler and trainer.
LOGPROB_BOUND = {"fp32": 1e-4, "bf16": 0.1}
SCORED = 32  # tokens
GIB = 2**30


@dataclass
class Column:
    """One way to train. Both parts are timed; ``forward_backward`` returns the loss of the batch."""

    forward_backward: Callable[[], float]
    optimizer_step: Callable[[], object]
    passes: list[float] = field(default_factory=list)  # seconds
    steps: list[float] = field(default_factory=list)
    at_rest: int = 0  # bytes that it holds between steps
    peak: int = 0  # most bytes during a step, all columns together


@dataclass(frozen=True)
class Synced:
    """What synchronisations cost: the seconds of each, and bytes; None on a CPU."""

    seconds: list[float]
    sampler: int | None  # that the sampler holds beside its cache
    peak: int | None  # that one synchronisation takes for a while
    difference: float  # of the log-probabilities

    def report(self) -> dict[str, float | None]:
        return {
            "seconds": statistics.median(self.seconds[1:]),
            "first_seconds": self.seconds[0],
            "sampler_gib": None if self.sampler is None else self.sampler / GIB,
            "peak_gib": None if self.peak is None else self.peak / GIB,
            "logprob_difference": self.difference,
        }


def main() -> None:
    args = parse_arguments()
    batch = make_batch(args)
    tokens = args.batch * args.length
    print(f"{args.model}: {args.batch} × {args.length} = {tokens} tokens, {args.dtype}, {args.device}", flush=True)
    trainer, columns = make_columns(args, batch)
    measure(args, columns)
    report = make_report(args, tokens, columns)
    print_columns(report)
    del columns
    release_memory()
    if args.sync_steps:
        costs = {"server": server_versions(args, trainer, batch)}
        del trainer
        release_memory()
        costs["library"] = library(args, batch, torch.float32)
        release_memory()
        if args.dtype == "bf16":
            costs["shared"] = library(args, batch, torch.bfloat16)
        report["synchronisation"] = {name: each.report() for name, each in costs.items()}
        print_synchronisation(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random://llama-1b", help="the id of a model")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--len", type=int, default=512, dest="length", help="tokens per sequence")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each column")
    parser.add_argument("--sync-steps", type=int, default=5, help="synchronisations of each kind; 0: none")
    parser.add_argument("--kv-mib", type=int, default=256, help="MiB of a sampler's cache of keys and values")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    for name, least in (("batch", 1), ("length", 1), ("steps", 1), ("sync_steps", 0), ("kv_mib", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}, allowed: an integer ≥ {least}")
    if args.sync_steps == 1:
        parser.error("--sync-steps: got 1, allowed: 0, or an integer ≥ 2, since the first one is a warm-up")
    return args


def make_batch(args: argparse.Namespace) -> list[Datum]:
    vocabulary = AutoConfig.from_pretrained(hub.resolve(args.model).path).vocab_size
    rows = np.random.default_rng(0).integers(0, vocabulary, (args.batch, args.length + 1))
    return [Datum(row[:-1], row[1:]) for row in rows]


# --- columns ----------------------------------------------------------------------------------------------------------


def make_columns(args: argparse.Namespace, batch: list[Datum]) -> tuple[FullTrainer, dict[str, Column]]:
    """Return our trainer and all columns, each after its first step. Exit if our numbers are not those of ``plain``."""
    columns: dict[str, Column] = {}

    def add(name: str, column: Column, before: int) -> None:
        column.forward_backward()
        column.optimizer_step()
        column.at_rest = used(args) - before
        columns[name] = column

    before, started = used(args), time.perf_counter()
    trainer = FullTrainer.from_pretrained(args.model, device=args.device, dtype=args.dtype)
    trainer.create_adapter(RUN, FullSpec())
    print(f"start-up {time.perf_counter() - started:.1f} s; {trainer.memory}", flush=True)
    start = {name: weight.cpu().clone() for name, weight in trainer.compute_weights().items()}
    item = TrainItem(RUN, batch)
    loss, gradient = our_loss(trainer, item), trainer.gradients(RUN)
    trainer.zero_grad(RUN)
    add("ours", Column(lambda: our_loss(trainer, item), lambda: trainer.optim_step(RUN, ADAM)), before)

    before = used(args)
    plain = Plain(args, batch, start, masters=True)
    compare(args, loss, gradient, plain)
    del gradient
    add("plain", Column(plain.forward_backward, plain.optimizer_step), before)
    if args.dtype == "bf16":
        before = used(args)
        half = Plain(args, batch, start, masters=False)
        add("plain half", Column(half.forward_backward, half.optimizer_step), before)
    return trainer, columns


def our_loss(trainer: FullTrainer, item: TrainItem) -> float:
    (result,) = trainer.forward_backward([item])
    assert isinstance(result, TrainResult), result
    return result.metrics["loss:sum"]


class Plain:
    """A model of Transformers, trained by autograd and torch's fused AdamW."""

    def __init__(
        self, args: argparse.Namespace, batch: list[Datum], weights: Mapping[str, torch.Tensor], *, masters: bool
    ) -> None:
        """``masters``: train fp32 weights, of which the model has a copy in its dtype; in fp32 they are the model's."""
        self.model = transformers_model(args, weights)
        self._ids = torch.from_numpy(np.stack([datum.tokens for datum in batch]))
        self._targets = torch.from_numpy(np.stack([np.asarray(datum.targets) for datum in batch]))
        self._device = args.device
        self._parameters = list(self.model.parameters())
        separate = masters and args.dtype != "fp32"
        self._masters = [p.detach().float() for p in self._parameters] if separate else self._parameters
        self._separate = separate
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=ADAM.learning_rate,
            betas=(ADAM.beta1, ADAM.beta2),
            eps=ADAM.eps,
            weight_decay=ADAM.weight_decay,
            fused=True,
        )

    def forward_backward(self) -> float:
        ids, targets = self._ids.to(self._device), self._targets.to(self._device)
        logits = self.model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        return loss.item()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    @torch.no_grad()
    def optimizer_step(self) -> None:
        if self._separate:
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                master.grad = parameter.grad.float()
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, ADAM.grad_clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._separate:
            torch._foreach_copy_(self._parameters, self._masters)


def transformers_model(args: argparse.Namespace, weights: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(hub.resolve(args.model).path)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype], attn_implementation="sdpa")
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model.train()


def compare(args: argparse.Namespace, loss: float, gradient: Mapping[str, np.ndarray], plain: Plain) -> None:
    """Exit if our loss or gradient is wrong, because then the times would mean nothing."""
    theirs = plain.forward_backward()
    difference = norm = 0.0
    for name, own in plain.gradients().items():
        exact = own.detach().float().cpu()
        difference += float((torch.from_numpy(gradient[name]) - exact).double().square().sum())
        norm += float(exact.double().square().sum())
    plain.model.zero_grad()
    away, off = math.sqrt(difference / norm), abs(loss - theirs) / abs(theirs)
    print(f"ours and plain differ by {away:.1e} in the gradient and by {off:.1e} in the loss", flush=True)
    if not (away <= GRADIENT_BOUND[args.dtype] and off <= LOSS_BOUND[args.dtype]):
        raise SystemExit(f"allowed are {GRADIENT_BOUND[args.dtype]:.0e} and {LOSS_BOUND[args.dtype]:.0e}")


def measure(args: argparse.Namespace, columns: Mapping[str, Column]) -> None:
    """Time the columns in turns, after a further warm-up."""
    cuda = args.device.startswith("cuda")
    for number in range(args.steps + 1):
        for column in columns.values():
            synchronize(args)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            column.forward_backward()
            synchronize(args)
            passed = time.perf_counter()
            column.optimizer_step()
            synchronize(args)
            ended = time.perf_counter()
            if number:
                column.passes.append(passed - started)
                column.steps.append(ended - started)
                column.peak = max(column.peak, torch.cuda.max_memory_allocated() if cuda else 0)


# --- synchronisation --------------------------------------------------------------------------------------------------


def server_versions(args: argparse.Namespace, trainer: FullTrainer, batch: list[Datum]) -> Synced:
    """Measure what the server does: the sampler has a base model of its own, and places for two versions."""
    before = used(args)
    base = Trainer.from_pretrained(
        args.model, device=args.device, dtype=args.dtype, memory_budget_bytes=trainer.memory.adapters
    )
    versions = WeightVersions(base, lambda _run: trainer.compute_weights(), 2)
    sampler = TorchSampler(base, None, kv_budget_bytes=args.kv_mib * 2**20, versions=versions)
    held = used(args) - before - sampler.cache_bytes
    item, seconds, peaks, differences = TrainItem(RUN, batch), [], [], []
    scored = batch[0].tokens[:SCORED]
    for number in range(args.sync_steps):
        our_loss(trainer, item)
        trainer.optim_step(RUN, ADAM)
        taken, peak = timed(args, lambda version=f"v{number}": sampler.publish(version, RUN))
        seconds.append(taken)
        peaks.append(peak)
        (result,) = trainer.forward([TrainItem(RUN, [Datum(scored[:-1], scored[1:])])])
        assert isinstance(result, TrainResult), result
        differences.append(np.abs(sampler_scores(sampler, f"v{number}", scored) - result.logprobs[0]).mean())
        sampler.retire(f"v{number}")
    return synced(args, seconds, held, peaks, differences)


def sampler_scores(sampler: TorchSampler, version: str, tokens: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of all tokens but the first."""
    asked = SampleRequest("score", version, tokens, SamplingParams(max_tokens=1), prompt_logprobs=True)
    sampler.submit(asked)
    ended: list[Any] = []
    while sampler.busy:
        ended += [each.outcome for each in sampler.step() if hasattr(each, "outcome")]
    (outcome,) = ended
    assert not isinstance(outcome, SampleFailure), outcome
    return outcome.prompt_logprobs[1:]


def library(args: argparse.Namespace, batch: list[Datum], weights_dtype: torch.dtype) -> Synced:
    """Measure ``sync_weights`` from a TransformersModel to a LocalSampler of the same process."""
    precision = "bf16" if args.dtype == "bf16" and weights_dtype == torch.float32 else "no"
    model = TransformersModel(model_id=args.model, mixed_precision=precision, device=args.device, dtype=weights_dtype)
    model.set_optimizer("AdamW", lr=ADAM.learning_rate)
    features = [{"input_ids": datum.tokens.tolist(), "labels": datum.targets.tolist()} for datum in batch]
    before = used(args)
    sampler = LocalSampler(model, kv_budget_bytes=args.kv_mib * 2**20)
    held = used(args) - before - sampler.engine.cache_bytes
    manager = CheckpointEngineManager(model, sampler)
    seconds, peaks, differences = [], [], []
    params = LibraryParams(max_tokens=SCORED, seed=1, logprobs=1)
    prompt = {"input_ids": batch[0].tokens[:SCORED].tolist(), "labels": [-100] * SCORED}
    for _ in range(args.sync_steps):
        model.forward_backward(inputs=features)
        model.clip_grad_and_step()
        taken, peak = timed(args, manager.sync_weights)
        seconds.append(taken)
        peaks.append(peak)
        (response,) = sampler.sample([prompt], params)
        (sequence,) = response.sequences
        drawn = np.array([pairs[0][1] for pairs in sequence.logprobs])
        row = model.forward_only(inputs=[sequence.new_input_feature])["logps"][0]
        mask = np.asarray(sequence.new_input_feature["labels"]) != -100
        computed = row.detach().float().cpu().numpy()[: len(mask)][mask]
        differences.append(np.abs(drawn - computed).mean())
    return synced(args, seconds, held, peaks, differences)


def synced(
    args: argparse.Namespace, seconds: list[float], held: int, peaks: list[int], differences: list[float]
) -> Synced:
    """Return the costs. Exit if the sampler's log-probabilities are not those of the trainer."""
    worst, cuda = float(max(differences)), args.device.startswith("cuda")
    if not worst <= LOGPROB_BOUND[args.dtype]:
        raise SystemExit(f"sampler and trainer differ by {worst:.1e}; allowed {LOGPROB_BOUND[args.dtype]:.0e}")
    return Synced(seconds, held if cuda else None, max(peaks) if cuda else None, worst)


# --- timing and report ------------------------------------------------------------------------------------------------


def timed(args: argparse.Namespace, work: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds that some work takes, and the bytes that it takes at most for a while."""
    cuda, before = args.device.startswith("cuda"), used(args)
    synchronize(args)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    work()
    synchronize(args)
    taken = time.perf_counter() - started
    return taken, torch.cuda.max_memory_allocated() - before if cuda else 0


def synchronize(args: argparse.Namespace) -> None:
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()


def used(args: argparse.Namespace) -> int:
    """Return the bytes of tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if args.device.startswith("cuda") else 0


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_report(args: argparse.Namespace, tokens: int, columns: Mapping[str, Column]) -> dict[str, Any]:
    held = sum(column.at_rest for column in columns.values())
    rows = {
        name: {
            "step_s": statistics.median(column.steps),
            "forward_backward_s": statistics.median(column.passes),
            "tokens_per_s": tokens / statistics.median(column.steps),
            "at_rest_gib": column.at_rest / GIB,
            "peak_gib": (column.peak - held + column.at_rest) / GIB if column.peak else None,
        }
        for name, column in columns.items()
    }
    ours = rows["ours"]["tokens_per_s"]
    return {
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "machine": machine(args),
        "tokens": tokens,
        "columns": rows,
        "ours_over": {name: ours / row["tokens_per_s"] for name, row in rows.items() if name != "ours"},
    }


def machine(args: argparse.Namespace) -> dict[str, str]:
    cuda = args.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def print_columns(report: Mapping[str, Any]) -> None:
    print(f"\n{'':12} {'step':>10} {'fwd+bwd':>10} {'tokens/s':>10} {'at rest':>10} {'peak':>10}")
    for name, row in report["columns"].items():
        peak = "" if row["peak_gib"] is None else f"{row['at_rest_gib']:6.1f} GiB {row['peak_gib']:6.1f} GiB"
        print(
            f"{name:12} {1000 * row['step_s']:7.0f} ms {1000 * row['forward_backward_s']:7.0f} ms "
            f"{row['tokens_per_s']:10.0f} {peak}"
        )
    for name, ratio in report["ours_over"].items():
        print(f"ours over {name} {ratio:.3f}", flush=True)


def print_synchronisation(report: Mapping[str, Any]) -> None:
    print(f"\n{'':12} {'sync':>10} {'first':>10} {'|Δ logprob|':>12} {'sampler':>10} {'peak':>10}")
    for name, row in report["synchronisation"].items():
        held = "" if row["peak_gib"] is None else f"{row['sampler_gib']:6.2f} GiB {row['peak_gib']:6.2f} GiB"
        print(
            f"{name:12} {1000 * row['seconds']:7.1f} ms {1000 * row['first_seconds']:7.1f} ms "
            f"{row['logprob_difference']:12.1e} {held}"
        )


if __name__ == "__main__":
    main()
