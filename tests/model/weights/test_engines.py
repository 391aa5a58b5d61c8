"""Buckets by broadcast: who sends to whom, and that the numbers arrive. gloo stands for NCCL."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.models.gloo_engine import GlooCheckpointEngine
from twinkle.checkpoint_engine import HCCLCheckpointEngine, NCCLCheckpointEngine
from twinkle.errors import TwinkleError, UnsupportedError
from twinkle.model.weights.buckets import Bucket, TensorMeta, plan_buckets

TENSORS = {"w": torch.randn(5, 3), "b": torch.arange(7, dtype=torch.bfloat16), "n": torch.arange(3)}


def test_the_first_worker_of_the_model_sends_to_all_workers_of_the_sampler() -> None:
    topology = NCCLCheckpointEngine.build_topology(3, 2)
    assert (topology.model, topology.sampler, topology.world_size) == ((0, -1, -1), (1, 2), 3)
    assert NCCLCheckpointEngine.build_topology(1, 1).world_size == 2


def test_all_receivers_get_the_numbers_of_the_sender() -> None:
    metas = [TensorMeta(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]
    buckets = plan_buckets(metas, 32)
    assert len(buckets) > 2
    engines = [GlooCheckpointEngine() for _ in range(4)]
    sender, outside, *receivers = engines
    place = sender.prepare("127.0.0.1")
    topology = NCCLCheckpointEngine.build_topology(2, 2)
    ranks = (*topology.model, *topology.sampler)
    found: list[dict[str, torch.Tensor]] = [
        {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()} for _ in receivers
    ]

    def send(engine: NCCLCheckpointEngine) -> None:
        for pieces in buckets:
            parts = [TENSORS[piece.name].view(-1)[piece.start : piece.stop] for piece in pieces]
            engine.send_weights(Bucket(pieces, tuple(parts)))

    def receive(number: int) -> None:
        for pieces in buckets:
            for piece, numbers in receivers[number].receive_weights(pieces):
                found[number][piece.name].view(-1)[piece.start : piece.stop] = numbers

    with ThreadPoolExecutor(4) as threads:
        joined = [
            threads.submit(engine.init_process_group, rank, topology.world_size, place)
            for engine, rank in zip(engines, ranks, strict=True)
        ]
        for each in joined:
            each.result(60)
        work = [threads.submit(send, sender), threads.submit(send, outside)]
        work += [threads.submit(receive, number) for number in range(len(receivers))]
        for each in work:
            each.result(60)
    for each in found:
        for name, tensor in TENSORS.items():
            assert torch.equal(each[name], tensor)
    for engine in engines:
        engine.finalize()


def test_what_is_missing_is_told() -> None:
    with pytest.raises(TwinkleError, match="call init_process_group first"):
        GlooCheckpointEngine().receive_weights([TensorMeta("w", (2,), torch.float32)])
    with pytest.raises(TwinkleError, match="call prepare first"):
        GlooCheckpointEngine().init_process_group(0, 2, ("127.0.0.1", 1))
    with pytest.raises(UnsupportedError, match="NPUs"):
        HCCLCheckpointEngine()
