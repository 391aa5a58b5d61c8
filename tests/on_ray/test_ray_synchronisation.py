"""sync_weights from a model on workers to a sampler on other workers, through Ray's object store."""

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest

from tests.on_ray.gloo_components import FailingSampler, GlooModel, GlooSampler
from tests.sampler.vllm.vllm_model import write_model
from tests.support.models import peak_memory
from twinkle import WorkerDiedError
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.errors import UserError
from twinkle.infra import DeviceMesh, LazyResult
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.sampler import LocalSampler

pytestmark = pytest.mark.ray

MODEL = "random://llama-tiny"
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
A = "a"
BUCKET_MB = 0.03
STEPS = 10

Model = MultiLoraTransformersModel | TransformersModel


def row(length: int, seed: int) -> dict:
    tokens = np.random.default_rng(seed).integers(0, 500, length).tolist()
    return {"input_ids": tokens, "labels": [*tokens[1:], -100]}


BATCH = [row(9, 1), row(12, 2), row(5, 3)]
PROMPTS = [{"input_ids": row(6, 4)["input_ids"]}, {"input_ids": row(7, 5)["input_ids"]}]


def lora(**where: Any) -> Model:
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", **where)
    model.add_adapter_to_model(A, peft.LoraConfig(**LORA), seed=3)
    model.set_optimizer("AdamW", lr=1e-2, adapter_name=A)
    return model


def peft_lora(**where: Any) -> Model:
    model = TransformersModel(model_id=MODEL, mixed_precision="no", device="cpu", **where)
    model.add_adapter_to_model(A, peft.LoraConfig(**LORA))
    model.set_optimizer("AdamW", lr=1e-2, adapter_name=A)
    return model


def full(**where: Any) -> Model:
    model = TransformersModel(model_id=MODEL, mixed_precision="no", device="cpu", **where)
    model.set_optimizer("AdamW", lr=1e-2)
    return model


def shards(make: Callable[..., Model]) -> Callable[..., Model]:
    return lambda **where: make(device_mesh=DeviceMesh.from_sizes(fsdp_size=2, device_type="cpu"), **where)


KINDS: dict[str, tuple[Callable[..., Model], bool]] = {
    "adapter": (lora, False),
    "merged": (lora, True),
    "full": (full, True),
    "PEFT adapter in shards": (shards(peft_lora), False),
    "PEFT merged in shards": (shards(peft_lora), True),
    "merged in shards": (shards(lora), True),
    "full in shards": (shards(full), True),
}


def result(outputs: Any) -> Any:
    return outputs() if isinstance(outputs, LazyResult) else outputs


def end(*components: Any) -> None:
    for each in components:
        each._workers.end()


def adapter(model: Model) -> dict[str, str]:
    """Return the adapter's name as the argument that verbs of a multi-LoRA model require."""
    return {"adapter_name": A} if isinstance(model, MultiLoraTransformersModel) else {}


def train(model: Model) -> None:
    model.forward_backward(inputs=BATCH, **adapter(model))
    model.clip_grad_and_step(**adapter(model))


def assert_same(model: Model, sampler: LocalSampler, name: str) -> None:
    """The log-probabilities of samples are those that the model computes for the same tokens."""
    responses = sampler.sample(PROMPTS, SamplingParams(max_tokens=5, seed=1, logprobs=1))
    assert {response.weights_version for response in responses} == {name}
    sequences = [response.sequences[0] for response in responses]
    whole = [[*prompt["input_ids"], *each.tokens] for prompt, each in zip(PROMPTS, sequences, strict=True)]
    rows = [{"input_ids": tokens, "labels": [*tokens[1:], -100]} for tokens in whole]
    logps = result(model.forward_only(inputs=rows, **adapter(model)))["logps"]
    for index, each in enumerate(sequences):
        found = np.array([pair[1] for [pair] in each.logprobs])
        last = len(whole[index]) - 1
        wanted = logps[index, last - len(found) : last].numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def sampler(program) -> Iterator[LocalSampler]:
    sampler = LocalSampler(MODEL, dtype="fp32", remote_group="data", instance_id="synchronised")
    yield sampler
    end(sampler)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_computes_what_the_model_computes(kind: str, sampler: LocalSampler) -> None:
    make, merge = KINDS[kind]
    model = make(remote_group="work")
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB)
    for _ in range(STEPS):
        train(model)
        assert_same(model, sampler, manager.sync_weights(merge_and_sync=merge))
    end(model)


def test_a_sampler_on_two_workers(program) -> None:
    model, sampler = full(remote_group="data"), LocalSampler(MODEL, dtype="fp32", remote_group="work")
    train(model)
    assert_same(model, sampler, CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB).sync_weights())
    end(model, sampler)


def test_only_one_of_them_on_workers(sampler: LocalSampler) -> None:
    here = full()
    train(here)
    assert_same(here, sampler, CheckpointEngineManager(here, sampler).sync_weights())
    there, own = full(remote_group="work"), LocalSampler(MODEL, dtype="fp32")
    train(there)
    assert_same(there, own, CheckpointEngineManager(there, own).sync_weights())
    end(there)


class Watched:
    """A model on workers; ``after`` is called when a bucket was asked for, with the number of buckets that exist."""

    def __init__(self, model: Any, after: Callable[[int], None]) -> None:
        self._model = model
        self._after = after
        self._alive: weakref.WeakSet[LazyResult] = weakref.WeakSet()
        self.buckets = 0

    @property
    def __class__(self) -> type:
        return self._model.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def send_weights(self, *args: Any) -> Any:
        bucket = self._model.send_weights(*args)
        assert isinstance(bucket, LazyResult), "the driver never holds the numbers"
        self._alive.add(bucket)
        self.buckets += 1
        self._after(len(self._alive))
        return bucket


def test_at_most_two_buckets_exist(sampler: LocalSampler) -> None:
    counts: list[int] = []
    model = full(remote_group="work")
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB)
    manager.model = Watched(model, counts.append)
    assert_same(model, sampler, manager.sync_weights())
    assert len(counts) > 10
    assert max(counts) <= 2
    end(model)


def pids(component: Any) -> list[int]:
    """Return the process ids of a component's workers, which give freed memory back to the system from now on."""
    import ray

    def pid(_: Any) -> int:
        import ctypes
        import os

        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: blocks of 1 MiB and more
        return os.getpid()

    return ray.get([actor.__ray_call__.remote(pid) for actor in component._workers.actors])


@pytest.mark.parametrize("where", ["shards", "one worker", "here"])
def test_no_process_takes_more_than_two_buckets(where: str, program, tmp_path: Path) -> None:
    """A model of 100 MiB and a bucket of 8. What is in Ray's object store at a time is counted by the test above.

    Broadcasts are not measured: with gloo, which stands for NCCL here, the sender keeps several buffers of its own.
    """
    folder = peak_memory.save_100_mib(tmp_path)
    common = {"model_id": folder, "mixed_precision": "no", "device": "cpu"}
    mesh = DeviceMesh.from_sizes(fsdp_size=2, device_type="cpu")
    make: dict[str, Callable[[], Model]] = {
        "shards": lambda: TransformersModel(**common, device_mesh=mesh, remote_group="work"),
        "one worker": lambda: TransformersModel(**common, remote_group="data"),
        "here": lambda: TransformersModel(**common),
    }
    model = make[where]()
    sampler = LocalSampler(folder, dtype="fp32", kv_budget_bytes=1 << 20, remote_group="data")
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=peak_memory.BUCKET_MB)
    workers = [*pids(sampler), *([] if where == "here" else pids(model)), os.getpid()]
    manager.sync_weights()
    peaks = [peak_memory.PeakMemory(pid) for pid in workers]
    manager.sync_weights()
    rises = [peak.above() for peak in peaks]
    end(sampler, *([] if where == "here" else [model]))
    assert max(rises) <= 2 * peak_memory.BUCKET_MB, rises


def test_from_gpu_to_gpu(program) -> None:
    """Weights do not pass through the object store if workers have GPUs of their own; here gloo stands for NCCL."""
    mesh = DeviceMesh.from_sizes(fsdp_size=2, device_type="cpu")
    model = GlooModel(model_id=MODEL, mixed_precision="no", device="cpu", device_mesh=mesh, remote_group="work")
    model.set_optimizer("AdamW", lr=1e-2)
    sampler = GlooSampler(MODEL, dtype="fp32", remote_group="work")
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB)
    assert manager._broadcasts is not None
    manager.model = Watched(model, lambda _: pytest.fail("a bucket went through the object store"))
    for _ in range(3):
        train(model)
        assert_same(model, sampler, manager.sync_weights())
    end(model, sampler)


def test_weights_that_do_not_fit(sampler: LocalSampler, tmp_path: Path) -> None:
    other = TransformersModel(
        model_id=str(write_model(tmp_path / "other", tied=False)), mixed_precision="no", remote_group="work"
    )
    before = sampler.sample(PROMPTS, SamplingParams(max_tokens=5, seed=1, logprobs=1))
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        CheckpointEngineManager(other, sampler).sync_weights()
    after = sampler.sample(PROMPTS, SamplingParams(max_tokens=5, seed=1, logprobs=1))
    assert [each.sequences[0].logprobs for each in after] == [each.sequences[0].logprobs for each in before]
    end(other)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_whose_worker_dies(rank: int, sampler: LocalSampler) -> None:
    """It is an error, and the sampler refuses until weights arrive whole."""
    import ray

    model = shards(full)(remote_group="work")
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB)
    watched = Watched(model, lambda _: ray.kill(model._workers.actors[rank]) if watched.buckets == 4 else None)
    manager.model = watched
    with pytest.raises(WorkerDiedError, match=f"rank {rank} of group 'work' died"):
        manager.sync_weights()
    with pytest.raises(UserError, match=r"the last sync_weights failed \(WorkerDiedError"):
        sampler.sample(PROMPTS)
    end(model)
    fresh = full(remote_group="work")
    assert_same(fresh, sampler, CheckpointEngineManager(fresh, sampler).sync_weights())
    end(fresh)


def test_a_sampler_whose_worker_dies(program) -> None:
    """It is an error; the other workers of the sampler refuse."""
    import ray

    model, sampler = full(remote_group="data"), LocalSampler(MODEL, dtype="fp32", remote_group="work")
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB)
    watched = Watched(model, lambda _: ray.kill(sampler._workers.actors[1]) if watched.buckets == 4 else None)
    manager.model = watched
    with pytest.raises(WorkerDiedError, match="rank 1 of group 'work' died"):
        manager.sync_weights()
    with pytest.raises((UserError, WorkerDiedError)):
        sampler.sample(PROMPTS)
    end(model, sampler)


def test_a_failure_on_one_worker_of_the_sampler(program) -> None:
    """Each worker refuses or has the old weights; and later versions have the same name on all of them."""
    model, sampler = full(remote_group="data"), FailingSampler(MODEL, dtype="fp32", remote_group="work")
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB)
    old = manager.sync_weights()
    # The worker that fails at its first bucket still has its old weights, the other one has replaced some.
    keep_old = {"prepare_weights": (True, True), "receive_bucket": (False, True), "finish_weights": (False, False)}
    for method, keeps in keep_old.items():
        train(model)
        sampler.fail_in(method)
        with pytest.raises(ConnectionError, match="cut"):
            manager.sync_weights()
        for told, keeps_old in zip(sampler.version_or_refusal(), keeps, strict=True):
            assert told == old if keeps_old else "the last sync_weights failed" in told
        sampler.fail_in("")
        old = manager.sync_weights()
        assert sampler.version_or_refusal() == [old, old]
        assert_same(model, sampler, old)
    end(model, sampler)


@pytest.mark.parametrize("method", ["prepare_weights", "finish_weights"])
def test_a_sampler_whose_worker_dies_at(method: str, program) -> None:
    import ray

    model, sampler = full(remote_group="data"), FailingSampler(MODEL, dtype="fp32", remote_group="work")
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB)
    old = manager.sync_weights()
    train(model)
    first, second = sampler._workers.actors
    manager.sampler = Before(sampler, method, lambda: ray.kill(second))
    with pytest.raises(WorkerDiedError, match="rank 1 of group 'work' died"):
        manager.sync_weights()
    told, _ = ray.get(first.call.remote("version_or_refusal", "all", None, ((), {})))
    assert told == old if method == "prepare_weights" else "the last sync_weights failed" in told
    with pytest.raises((UserError, WorkerDiedError)):
        sampler.sample(PROMPTS)
    end(model, sampler)


class Before:
    """A sampler on workers; ``action`` is called before one of its methods."""

    def __init__(self, sampler: Any, method: str, action: Callable[[], None]) -> None:
        self._sampler, self._method, self._action = sampler, method, action

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._action()
        return getattr(self._sampler, name)
