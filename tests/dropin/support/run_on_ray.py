"""Run scripts of this folder that use Ray, one after another on one cluster, and record what they call.

    python run_on_ray.py SAMPLER JOBS

SAMPLER is vllm, or torch: then the scripts find the torch sampler under the name vLLMSampler. JOBS is a JSON file with
a list of jobs: ``script``, ``settings``, ``record`` and ``log`` as in run_scripts.py, ``arguments``, and ``folder``,
which receives the initial weights of an adapter, ``initial``, and those of each synchronisation, ``synced/<version>``.
The results of calls that return promises are recorded too; a promise among the arguments is recorded as its text, and
not fetched.

Models and samplers compute in fp32, whatever this CPU has instructions for. Samples have seeds, so that every run of a
script draws the same tokens.
"""

import functools
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from run_scripts import Recorder, with_settings

MODEL_CALLS = ("forward_backward", "forward_only", "calculate_metric", "save")
SAMPLER_CALLS = ("sample", "reset_prefix_cache")
# The option of each class that says in what it computes.
_PRECISION = {
    "MegatronModel": "mixed_precision",
    "MultiLoraMegatronModel": "mixed_precision",
    "TransformersModel": "mixed_precision",
    "TransformersValueModel": "mixed_precision",
    "vLLMSampler": "dtype",
}


class RayRecorder(Recorder):
    """Records the calls of proxies. Their results are fetched when they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path()  # of the script that runs
        self.seeds = count(0, 1000)  # of its samples

    def begin(self, folder: Path) -> None:
        """Forget the calls of the script before; the next one has this folder."""
        self.clear()
        self.folder, self.seeds = folder, count(0, 1000)

    def write(self, file: Path) -> None:
        from twinkle.infra import LazyResult

        calls = [
            (name, given, result() if isinstance(result, LazyResult) else result) for name, given, result in self._calls
        ]
        self._calls = [
            (name, given, [asdict(response) for response in result] if name == "sample" else result)
            for name, given, result in calls
        ]
        super().write(file)


def record_model(recorder: RayRecorder, owner: type) -> None:
    """Record the calls of a model's proxies, and save the initial weights of its adapter."""
    add, save = owner.add_adapter_to_model, owner.save

    @functools.wraps(add)
    def add_adapter_to_model(it: Any, adapter_name: str, *arguments: Any, **keywords: Any) -> Any:
        added = add(it, adapter_name, *arguments, **keywords)
        save(it, "initial", output_dir=str(recorder.folder), adapter_name=adapter_name)
        return added

    for name in MODEL_CALLS:
        recorder.wrap(owner, name, ("name",) if name == "save" else ())
    owner.add_adapter_to_model = add_adapter_to_model


def save_synced(recorder: RayRecorder, owner: type, saves: dict[type, Any]) -> None:
    """Save the model's weights after each synchronisation, under the name that they have in samples.

    ``saves``: the method ``save`` of each class of proxies, which is not recorded.
    """
    sync = owner.sync_weights

    @functools.wraps(sync)
    def sync_weights(it: Any, *arguments: Any, **keywords: Any) -> str:
        version = sync(it, *arguments, **keywords)
        saves[it.model.__class__](it.model, version, output_dir=str(recorder.folder / "synced"))
        return version

    owner.sync_weights = sync_weights


def record_all(recorder: RayRecorder, sampler: str) -> None:
    import twinkle.sampler
    from twinkle import model
    from twinkle.checkpoint_engine import CheckpointEngineManager
    from twinkle.infra.proxy import _proxy_class

    kinds: list[type] = [model.TransformersModel, model.TransformersValueModel]
    if find_spec("megatron"):
        kinds += [model.MegatronModel, model.MultiLoraMegatronModel]
    save_synced(recorder, CheckpointEngineManager, {kind: _proxy_class(kind).save for kind in kinds})
    for kind in kinds:
        record_model(recorder, _proxy_class(kind))
    recorder.wrap(CheckpointEngineManager, "sync_weights", ("merge_and_sync",))
    if sampler == "torch":
        from torch_for_vllm import vLLMSampler

        twinkle.sampler.vLLMSampler = vLLMSampler
    owner = _proxy_class(twinkle.sampler.vLLMSampler)
    seed_samples(recorder, owner)
    for name in SAMPLER_CALLS:
        recorder.wrap(owner, name, ("inputs", "sampling_params"))


def seed_samples(recorder: RayRecorder, owner: Any) -> None:
    """Give each call of ``sample`` a seed of its own, if it has none."""
    from twinkle.sampler.script.features import as_sampling_params

    sample = owner.sample

    @functools.wraps(sample)
    def seeded(it: Any, inputs: Any, sampling_params: Any = None, **keywords: Any) -> Any:
        params = as_sampling_params(sampling_params)
        if params.seed is None:
            params = replace(params, seed=next(recorder.seeds))
        return sample(it, inputs, params, **keywords)

    owner.sample = seeded


def compute_in_fp32() -> None:
    """Let every model and sampler on a worker group compute in fp32, unless a script says otherwise."""
    from twinkle.infra import proxy

    start = proxy.start_component

    @functools.wraps(start)
    def start_component(cls: type, args: Any, kwargs: dict[str, Any], *others: Any) -> Any:
        option = _PRECISION.get(cls.__name__)
        chosen = {} if option is None else {option: "fp32"}
        return start(cls, args, {**chosen, **kwargs}, *others)

    proxy.start_component = start_component


@contextmanager
def printing_to(file: str) -> Iterator[None]:
    """Run the body; what this process prints goes to a file."""
    kept = [os.dup(1), os.dup(2)]
    with open(file, "w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def run(job: dict[str, Any], recorder: RayRecorder) -> None:
    """Run a script. Its failure is part of its log, and there is no record then."""
    import twinkle

    script = Path(job["script"])
    recorder.begin(Path(job["folder"]))
    with printing_to(job["log"]):
        try:
            sys.argv = [str(script), *job["arguments"]]
            code = compile(with_settings(script.read_text(), job["settings"]), str(script), "exec")
            exec(code, {"__name__": "__main__", "__file__": str(script)})
            recorder.write(Path(job["record"]))
        except BaseException:  # noqa: BLE001 - the test that reads the log shows it
            traceback.print_exc()
        finally:
            twinkle.shutdown()


def start_cluster(ray: Any, tries: int = 3) -> None:
    """Start Ray. On a busy machine it may miss its own limit of 30 seconds, which cannot be set."""
    for left in reversed(range(tries)):
        try:
            ray.init(num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
            return
        except Exception:
            if not left:
                raise
            ray.shutdown()


def main() -> None:
    sampler, jobs = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))
    import ray

    start_cluster(ray)
    recorder = RayRecorder()
    compute_in_fp32()
    record_all(recorder, sampler)
    for job in json.loads(Path(jobs).read_text()):
        run(job, recorder)
    ray.shutdown()


if __name__ == "__main__":
    main()
