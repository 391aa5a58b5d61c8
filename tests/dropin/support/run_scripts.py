"""Run scripts of this folder and record what they call: ``python run_scripts.py JOBS``

JOBS is a JSON file with a list of jobs: ``script``, ``settings``, ``addresses``, ``record`` and ``log``. Each script
runs in a process of its own, forked from this one, which has imported what they all import. A job waits for the jobs
whose records it needs.

This program runs with our packages and with twinkle-kit, of which it uses the public names only. ``settings`` are
constants at the top of the script that get other values: numbers of rows, steps and tokens, and addresses that a user
would edit. ``addresses`` are settings too: each is the address of the last checkpoint in the record of an earlier job.
``record`` receives one JSON object for each call: its name, arguments and result. After an adapter is
created, its weights are saved under the name ``initial``, so that a test can train the same adapter with PEFT.
"""

import ast
import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

NATIVE = ("forward_backward", "forward_only", "clip_grad_and_step", "calculate_metric", "save", "get_train_configs")
TINKER = ("forward", "forward_backward", "optim_step", "save_state")
AT_ONCE = 3  # uploads wait for their next question to the server most of the time
IMPORTED = (
    "datasets",
    "peft",
    "tinker",
    "torch",
    "tqdm",
    "transformers",
    "twinkle.advantage",
    "twinkle.dataloader",
    "twinkle.dataset",
    "twinkle.metric",
    "twinkle.preprocessor",
    "twinkle.reward",
    "twinkle.server.common",
    "twinkle.template",
    "twinkle_agentic.envs",
    "twinkle_client.model",
    "twinkle_client.rollout",
    "twinkle_client.sampler",
)


def with_settings(text: str, settings: dict[str, Any]) -> ast.Module:
    """Return the script with other values for constants at its top. A name that is not there raises KeyError."""
    tree = ast.parse(text)
    left = dict(settings)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in left:
                statement.value = ast.copy_location(ast.Constant(left.pop(name)), statement.value)
    if left:
        raise KeyError(f"the script has no constants {sorted(left)}")
    return tree


def plain(value: Any) -> Any:
    """Return a value as JSON: models of pydantic, tensors and arrays as lists, and the text of anything else."""
    if hasattr(value, "model_input"):  # a Datum
        return {"tokens": value.model_input.to_ints(), "inputs": plain(dict(value.loss_fn_inputs))}
    if hasattr(value, "loss_fn_outputs"):  # the result of a forward or of a forward_backward
        return {"outputs": plain(list(value.loss_fn_outputs)), "metrics": plain(dict(value.metrics))}
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


class Recorder:
    """Keeps the calls in order. Results of the tinker SDK are awaited when they are written."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, dict[str, Any], Any]] = []

    def wrap(self, owner: type, name: str, positional: tuple[str, ...] = ()) -> None:
        """Record the calls of a method. ``positional``: the names of arguments that scripts give by position."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def method(it: Any, *arguments: Any, **keywords: Any) -> Any:
            given = {**dict(zip(positional, arguments, strict=False)), **keywords}
            seen = plain(given)
            result = original(it, *arguments, **keywords)
            self._calls.append((name, seen, result))
            return result

        setattr(owner, name, method)

    def note(self, name: str, result: Any, **given: Any) -> None:
        self._calls.append((name, given, result))

    def clear(self) -> None:
        self._calls.clear()

    def write(self, file: Path) -> None:
        with file.open("w") as lines:
            for name, given, result in self._calls:
                awaited = result.result(timeout=60) if callable(getattr(result, "result", None)) else result
                lines.write(json.dumps({"call": name, "given": given, "result": plain(awaited)}) + "\n")


def record_native(recorder: Recorder) -> None:
    model = import_module("twinkle_client.model").MultiLoraTransformersModel
    add = model.add_adapter_to_model

    @functools.wraps(add)
    def add_adapter_to_model(it: Any, adapter_name: str, *arguments: Any, **keywords: Any) -> Any:
        added = add(it, adapter_name, *arguments, **keywords)
        recorder.note("initial", save(it, name="initial").twinkle_path)
        return added

    save = model.save
    for name in NATIVE:
        recorder.wrap(model, name, ("inputs",) if name.startswith("forward") else ())
    model.add_adapter_to_model = add_adapter_to_model
    recorder.wrap(import_module("twinkle_client.sampler").vLLMSampler, "sample", ("inputs",))


def record_tinker(recorder: Recorder) -> None:
    tinker = import_module("tinker")
    create, save_state = tinker.ServiceClient.create_lora_training_client, tinker.TrainingClient.save_state

    @functools.wraps(create)
    def create_lora_training_client(it: Any, *arguments: Any, **keywords: Any) -> Any:
        client = create(it, *arguments, **keywords)
        recorder.note("initial", save_state(client, "initial").result().path)
        return client

    for name in TINKER:
        recorder.wrap(tinker.TrainingClient, name, ("data", "loss_fn") if name.startswith("forward") else ("given",))
    tinker.ServiceClient.create_lora_training_client = create_lora_training_client


def last_checkpoint(record: Path) -> str:
    calls = [json.loads(line) for line in record.open()]
    saved = [call["result"] for call in calls if call["call"] in ("save", "save_state")][-1]
    address = saved.get("twinkle_path") or saved["path"]
    return f"twinkle://{address.partition('://')[2]}"


def _has(distribution: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(distribution))
    return False


def run(job: dict[str, Any]) -> None:
    """Run a script in this process, which ends with it."""
    file = Path(job["script"])
    tempfile.tempdir = None  # the process that forked this one may have had another TMPDIR
    with open(job["log"], "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    settings = job["settings"] | {name: last_checkpoint(Path(record)) for name, record in job["addresses"].items()}
    code = compile(with_settings(file.read_text(), settings), str(file), "exec")
    recorder = Recorder()
    if file.parent.name == "tinker" and file.stem != "upload_to_hub":
        record_tinker(recorder)
    else:
        record_native(recorder)
    sys.argv = [str(file)]
    exec(code, {"__name__": "__main__", "__file__": str(file)})
    recorder.write(Path(job["record"]))


def main(jobs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Fork a process for each job, a few at once, and wait for all; in a child return its job."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))
    if _has("twinkle-kit"):
        sys.tracebacklimit = 0  # its sources stay closed, and a traceback shows lines of them
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            import_module(name)
    running: dict[int, dict[str, Any]] = {}

    def wait() -> None:
        child, status = os.wait()
        ended = {"script": running.pop(child)["script"], "code": os.waitstatus_to_exitcode(status)}
        print(json.dumps(ended), flush=True)

    for job in jobs:
        needed = set(job["addresses"].values())
        while len(running) >= AT_ONCE or needed & {each["record"] for each in running.values()}:
            wait()
        child = os.fork()
        if child == 0:
            return job
        running[child] = job
    while running:
        wait()
    return None


if __name__ == "__main__":
    mine = main(json.loads(Path(sys.argv[1]).read_text()))
    if mine is not None:
        run(mine)
