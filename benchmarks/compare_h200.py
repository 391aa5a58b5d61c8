"""Training, the service loop, our samplers and vLLM on one GPU, in one run: one JSON file and one page of tables.

The parts, in the order in which they run (``--only`` selects some):

    overhead       wall time, GPU time and kernels of small passes (overhead.py)
    training       16 tenants in one batch against one tenant with all sequences, and one tenant alone (multi_tenant.py)
    rollouts       tenants that train, publish and sample through a server (service_rollouts.py)
    torch-sampler  tokens per second of the torch sampler (sampler_rates.py)
    vllm-sampler   the same of our vLLM sampler
    vllm           the same of vLLM itself
    lora-cost      the torch sampler with adapters against the base model, and the time of a decode step

Training and rollouts use only the first of ``--models``. Each part runs in a process of its own, so that its GPU memory
is freed and its failure does not end the others. The JSON file and the tables are written again after every part, and
the exit status is 1 if a part failed. ``--add`` keeps what the file already has, so that several commands can fill one
file. The output of each part is in a folder beside the file.

vLLM may be installed elsewhere: ``--vllm-path`` is put in front of PYTHONPATH for the parts that use vLLM, and
``--vllm-python`` runs them with another interpreter, which must be able to import twinkle too.

    python benchmarks/compare_h200.py --json build/bench/h200.json
    python benchmarks/compare_h200.py --json build/bench/h200.json --add --only vllm --models 8b --vllm-path ~/site
    python benchmarks/compare_h200.py --json build/bench/tiny.json --models tiny --repeats 1
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare_tables import markdown

HERE = Path(__file__).parent
# The same names as in one_gpu.py, which is not imported here because it loads torch.
MODELS = {"tiny": "random://llama-tiny-wide", "1b": "random://llama-1b", "8b": "random://llama-8b"}
# "spawn", because a part has used torch's threads before vLLM starts its processes.
DEFAULT_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
LOG_LINES = 15  # of a failed part, shown on the terminal
TERMINATE_SECONDS = 10.0
VANISH_SECONDS = 3.0


@dataclass(frozen=True)
class Size:
    """The numbers of all parts."""

    tenants: tuple[int, ...] = (1, 2, 4, 8, 16)  # of a training pass; the part "training" uses the last
    seqs: int = 2
    length: int = 512
    prompts: tuple[int, ...] = (1, 4, 16)
    prompt: int = 256
    sequences: tuple[int, ...] = (16, 48, 128)
    decoded: int = 128  # tokens
    rollout_tenants: tuple[int, ...] = (16, 32)
    rounds: int = 8
    samples: int = 8
    lone_steps: int = 20
    requests: tuple[int, ...] = (1, 32, 256, 512)
    tokens: int = 256
    cost_requests: int = 256
    decode_steps: int = 48
    repeats: int = 3


FULL = Size()
QUICK = Size(
    tenants=(1, 16),
    prompts=(1, 16),
    sequences=(16,),
    rollout_tenants=(4,),
    rounds=2,
    lone_steps=5,
    requests=(1, 32),
    tokens=64,
    cost_requests=32,
    decode_steps=16,
    repeats=1,
)
TINY = Size(
    tenants=(1, 2),
    length=16,
    prompts=(1, 2),
    prompt=16,
    sequences=(8,),
    decoded=4,
    rollout_tenants=(2,),
    rounds=1,
    samples=2,
    lone_steps=2,
    requests=(1, 4),
    tokens=8,
    cost_requests=4,
    decode_steps=8,
)


@dataclass(frozen=True)
class Run:
    """One process of a part. ``case`` tells the processes of one part and model apart."""

    part: str
    model: str
    case: str
    script: str
    arguments: Sequence[object]
    uses_vllm: bool = False

    @property
    def name(self) -> str:
        return f"{self.part} {self.model} {self.case}".strip()


@dataclass
class Report:
    """The report of all parts so far, and its files."""

    path: Path
    content: dict[str, Any]
    failed: list[str] = field(default_factory=list)

    def add(self, run: Run, entry: dict[str, Any]) -> None:
        entry = {"model": run.model, "case": run.case, **entry}
        kept = [each for each in self.content["parts"].get(run.part, []) if not _same(each, entry)]
        self.content["parts"][run.part] = [*kept, entry]
        if entry["error"]:
            self.failed.append(run.name)
        self.write()

    def write(self) -> None:
        _replace(self.path, json.dumps(self.content, indent=2) + "\n")
        _replace(self.path.with_suffix(".md"), markdown(self.content))


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process of a part is ended as well
    report = Report(args.json, begin(args))
    runs, started = [run for part in args.only for run in PARTS[part](args)], time.perf_counter()
    for number, run in enumerate(runs, start=1):
        passed = time.perf_counter() - started
        print(f"[{passed:5.0f} s] {number} of {len(runs)}: {run.name} …", flush=True)
        entry = execute(args, run)
        report.add(run, entry)
        print(f"          {entry['error'] or 'done'} after {entry['seconds']:.0f} s", flush=True)
    print(f"[{time.perf_counter() - started:5.0f} s] {args.json}\n\n{markdown(report.content)}")
    if report.failed:
        raise SystemExit(f"failed: {', '.join(report.failed)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the tables get the ending .md")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1b", "8b"])
    parser.add_argument("--repeats", type=int, default=None, help="of every measurement; 3 by default, 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, to see whether all parts run")
    parser.add_argument("--add", action="store_true", help="keep other parts that FILE has from an earlier command")
    parser.add_argument("--limit", type=float, default=420.0, metavar="SECONDS", help="for each process of a part")
    parser.add_argument("--vllm-path", type=Path, default=None, metavar="DIR", help="where vLLM is installed")
    parser.add_argument("--vllm-python", type=Path, default=None, metavar="FILE", help="interpreter with vLLM")
    parser.add_argument("--vllm-seeds", action="store_true", help="also measure vLLM with a seed for each request")
    parser.add_argument("--memory-dir", type=Path, default=None, metavar="DIR", help="for our vLLM sampler's files")
    args = parser.parse_args()
    if args.repeats is not None and args.repeats < 1:
        parser.error(f"--repeats: got {args.repeats}, allowed: an integer ≥ 1")
    for name in ("vllm_path", "vllm_python", "memory_dir"):
        if getattr(args, name) is not None and not getattr(args, name).exists():
            parser.error(f"--{name.replace('_', '-')}: {getattr(args, name)} does not exist")
    return args


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """Return the report to start with: with --add, the one of the file."""
    earlier: dict[str, Any] = {}
    if args.add and args.json.exists():
        earlier = json.loads(args.json.read_text())
    args.json.parent.mkdir(parents=True, exist_ok=True)
    return {
        "commands": [*earlier.get("commands", []), " ".join(["python", *sys.argv])],
        "commit": _commit(),
        "parts": earlier.get("parts", {}),
    }


# --- parts ------------------------------------------------------------------------------------------------------------


def overhead(args: argparse.Namespace) -> Iterator[Run]:
    for model in args.models:
        size = size_of(args, model)
        options = ["--tenants", *size.tenants, "--seqs", size.seqs, "--len", size.length, "--prompts", *size.prompts]
        options += ["--prompt", size.prompt, "--sequences", *size.sequences, "--tokens", size.decoded]
        yield Run("overhead", model, "", "overhead.py", [*options, *model_options(args, model)])


def training(args: argparse.Namespace) -> Iterator[Run]:
    model = args.models[0]
    size = size_of(args, model)
    tenants = size.tenants[-1]
    options = ["--tenants", tenants, "--seqs", size.seqs, "--len", size.length, "--rank", 32, "--no-peft", "--alone"]
    options += ["--model", model, "--dtype", dtype(model), "--repeat", repeats(args, model)]
    yield Run("training", model, f"{tenants} × {size.seqs} × {size.length}", "multi_tenant.py", options)


def rollouts(args: argparse.Namespace) -> Iterator[Run]:
    model = args.models[0]
    size = size_of(args, model)
    for number, tenants in enumerate(size.rollout_tenants):
        options = ["--model", MODELS[model], "--dtype", dtype(model), "--tenants", tenants, "--steps", size.rounds]
        options += ["--sequences", size.seqs, "--len", size.length, "--samples", size.samples, "--prompt", size.prompt]
        # Each round leaves a version on disk: 86 MB of the 1b model, so two repeats of 32 tenants are 44 GB.
        repeated = max(1, round(repeats(args, model) * size.rollout_tenants[0] / tenants))
        options += ["--tokens", size.decoded, "--repeats", repeated, "--idle-seconds", 2]
        options += ["--lone-steps", 0 if number else size.lone_steps]
        yield Run("rollouts", model, f"{tenants} tenants", "service_rollouts.py", options)


def rates(part: str, engine: str) -> Callable[[argparse.Namespace], Iterator[Run]]:
    def runs(args: argparse.Namespace) -> Iterator[Run]:
        for model in args.models:
            size = size_of(args, model)
            options = ["--engine", engine, "--requests", *size.requests, "--tokens", size.tokens]
            if engine == "vllm-sampler" and args.memory_dir is not None:
                options += ["--memory-dir", args.memory_dir]
            if engine == "vllm" and args.vllm_seeds:
                options += ["--vllm-seeds"]
            options += model_options(args, model)
            yield Run(part, model, "", "sampler_rates.py", options, uses_vllm=engine != "torch")

    return runs


def lora_cost(args: argparse.Namespace) -> Iterator[Run]:
    for model in args.models:
        size = size_of(args, model)
        options = ["--engine", "torch", "--lora-cost", "--requests", size.cost_requests, "--tokens", size.tokens]
        options += ["--sequences", *size.requests, "--prompt", size.prompt, "--decode-steps", size.decode_steps]
        yield Run("lora-cost", model, "", "sampler_rates.py", [*options, *model_options(args, model)])


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Run]]] = {
    "overhead": overhead,
    "training": training,
    "rollouts": rollouts,
    "torch-sampler": rates("torch-sampler", "torch"),
    "vllm-sampler": rates("vllm-sampler", "vllm-sampler"),
    "vllm": rates("vllm", "vllm"),
    "lora-cost": lora_cost,
}


def size_of(args: argparse.Namespace, model: str) -> Size:
    if model == "tiny":
        return TINY
    return QUICK if args.quick else FULL


def repeats(args: argparse.Namespace, model: str) -> int:
    return args.repeats or size_of(args, model).repeats


def dtype(model: str) -> str:
    return "fp32" if model == "tiny" else "bf16"


def model_options(args: argparse.Namespace, model: str) -> list[object]:
    return ["--model", model, "--dtype", dtype(model), "--repeats", repeats(args, model)]


# --- processes --------------------------------------------------------------------------------------------------------


def execute(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Run a part and return its report, or as much of it as there is, and what went wrong (None: nothing)."""
    folder = args.json.parent / f"{args.json.stem}-parts"
    folder.mkdir(exist_ok=True)
    result, log = (folder / f"{run.name.replace(' ', '-').replace('×', 'x')}{ending}" for ending in (".json", ".log"))
    result.unlink(missing_ok=True)
    python = args.vllm_python if run.uses_vllm and args.vllm_python is not None else sys.executable
    command = [str(each) for each in (python, HERE / run.script, *run.arguments, "--json", result)]
    started, clock = time.strftime("%Y-%m-%d %H:%M:%S"), time.perf_counter()
    with log.open("wb") as output:
        error = finish(command, environment(args, run), output, args.limit)
    if error is None and not result.exists():
        error = "it wrote no report"
    if error is not None:
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(f"    | {line}" for line in lines[-LOG_LINES:]), flush=True)
    return {
        "started": started,
        "seconds": round(time.perf_counter() - clock, 1),
        "command": " ".join(["python", *command[1:]]),
        "error": error,
        "result": json.loads(result.read_text()) if result.exists() else None,
    }


def finish(command: list[str], variables: dict[str, str], output: Any, limit: float) -> str | None:
    """Run a command to its end or to the limit. Return what went wrong. No process that it started stays alive."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(limit)
        return None if code == 0 else f"it ended with exit status {code}"
    except subprocess.TimeoutExpired:
        return f"it took more than {limit:g} s and was ended"
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen) -> None:
    """End a process and all that it started, which would keep memory of the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(int(VANISH_SECONDS / 0.1)):  # the next part measures the free memory of the GPU when it starts
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    process.wait()


def environment(args: argparse.Namespace, run: Run) -> dict[str, str]:
    variables = DEFAULT_VARIABLES | os.environ
    if run.uses_vllm and args.vllm_path is not None:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(args.vllm_path), os.environ.get("PYTHONPATH"))))
    return variables


def _same(entry: dict[str, Any], other: dict[str, Any]) -> bool:
    return (entry["model"], entry["case"]) == (other["model"], other["case"])


def _replace(path: Path, text: str) -> None:
    """Write a file, so that it is never half written when the process is killed."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text)
    unfinished.replace(path)


def _commit() -> str | None:
    with contextlib.suppress(OSError):
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
        return found.stdout.strip() or None
    return None


if __name__ == "__main__":
    main()
