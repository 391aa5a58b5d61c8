"""Decoding several tokens before the host reads them: which requests do so, and where their versions lie in memory.

The captured graphs need CUDA; here a stand-in computes the same tokens pass by pass.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.support.models.sampling import SPECS, assert_same_samples, prompt, request, run, toy_sampler, toy_trainer
from twinkle.model.adapters.adapter import Adapter
from twinkle.sampler import Finished, SampleRequest, TorchSampler
from twinkle.sampler.noise import uniform
from twinkle.sampler.torch_sampler import decode_graphs
from twinkle.sampler.torch_sampler.cache import blocks_for
from twinkle.sampler.torch_sampler.drawing import Drawn
from twinkle.sampler.torch_sampler.model_pass import Ahead, Piece


class Captured:
    """Replaces the graphs and the code that runs them; it accepts all versions except ``refused``."""

    def __init__(self, sampler: TorchSampler, refused: Sequence[Adapter] = (), max_rows: int = 3) -> None:
        self.max_rows = max_rows
        self.runs: list[int] = []
        self._refused = refused
        self._run = sampler._pass.run
        self._nobodys = sampler._cache.set_aside()
        sampler._graphs = self
        sampler._pass.run_ahead = self.run_ahead

    def takes(self, version: Adapter | None) -> bool:
        return not any(version is other for other in self._refused)

    def run_ahead(self, rows: Sequence[Ahead], steps: int) -> list[list[Drawn]]:
        assert 0 < len(rows) <= self.max_rows
        self.runs.append(len(rows))
        results: list[list[Drawn]] = [[] for _ in rows]
        for step in range(steps):
            pieces = [self._piece(row, drawn, step) for row, drawn in zip(rows, results, strict=True)]
            for drawn, computed in zip(results, self._run(pieces), strict=True):
                drawn.append(computed.drawn[0])
        return results

    def _piece(self, row: Ahead, drawn: list[Drawn], step: int) -> Piece:
        token, position = drawn[-1].token if drawn else row.token, row.position + step
        table = [*row.blocks, *[self._nobodys] * (blocks_for(position + 1) - len(row.blocks))]
        noise = uniform(row.seed, row.sample, row.drawn + step)
        return Piece(row.version, np.array([token]), position, table, (replace(row.draw, uniform=noise),))


def requests(length: int = 30) -> list[SampleRequest]:
    return [
        request(f"{name}", name, prompt(9 + 7 * n, n), 2, max_tokens=length + n, seed=n)
        for n, name in enumerate((None, *SPECS))
    ]


def test_the_same_tokens_as_one_at_a_time() -> None:
    trainer = toy_trainer()
    expected = run(toy_sampler(trainer), requests())
    sampler = toy_sampler(trainer)
    captured = Captured(sampler)
    for name, result in run(sampler, requests()).items():
        assert_same_samples(result, expected[name])
    assert captured.runs


def test_who_is_not_captured_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are not captured get at least one token in each turn, while others decode ahead."""
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    trainer = toy_trainer()
    expected = run(toy_sampler(trainer), requests())
    sampler = toy_sampler(trainer)
    Captured(sampler, [sampler._versions["b"]])
    long = [request(f"long{n}", "a", prompt(5, n), max_tokens=100, seed=n) for n in range(2)]
    for each in (*long, requests()[2]):
        sampler.submit(each)
    events = [event for _ in range(10) for event in sampler.step()]  # 80 tokens of the others
    assert events == []
    assert min(len(each.logprobs) for each in sampler._jobs["b"].sequences) >= 9
    while sampler.busy:
        events += sampler.step()
    outcomes = {event.request_id: event.outcome for event in events if isinstance(event, Finished)}
    assert_same_samples(outcomes["b"], expected["b"])


def test_out_of_memory_ahead_is_nobodys_problem() -> None:
    trainer = toy_trainer()
    expected = run(toy_sampler(trainer), requests())
    sampler = toy_sampler(trainer)
    captured, refused = Captured(sampler), []

    def limited(rows: Sequence[Ahead], steps: int) -> list[list[Drawn]]:
        if len(refused) % 3 == 0:
            refused.append(captured.run_ahead(rows, 3))  # it fails after three tokens
            raise torch.OutOfMemoryError("no more")
        refused.append([])
        return captured.run_ahead(rows, steps)

    sampler._pass.run_ahead = limited
    for name, result in run(sampler, requests()).items():
        assert_same_samples(result, expected[name])
    assert len(refused) > 3


def test_a_model_that_cannot_be_captured_decodes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    class TritonError(Exception):
        pass

    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.errors", SimpleNamespace(TritonError=TritonError))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine = SimpleNamespace(
        device=torch.device("cuda"), head=SimpleNamespace(chunk_rows=64), architecture=SimpleNamespace(family="wide")
    )
    cache = SimpleNamespace(keys=[torch.empty(0, dtype=torch.bfloat16)])
    for error in (RuntimeError("needs the host"), TritonError("out of resource: shared memory")):
        monkeypatch.setattr(decode_graphs, "DecodeGraphs", Mock(side_effect=error))
        assert decode_graphs.capture_decoding(engine, cache, 8, 128, Mock()) is None


def slot_lora(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module without its kernels, which need Triton."""
    kernels = SimpleNamespace(MAX_RANK=128, TILE_ROWS=16, Tiles=None, add_lora=None, usual_tiles=None)
    monkeypatch.setitem(sys.modules, "twinkle.sampler.torch_sampler.slot_lora_kernels", kernels)
    spec = find_spec("twinkle.sampler.torch_sampler.slot_lora")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_addresses_follow_a_version_that_was_paged_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version comes back to the same slot, but the block is at another address."""
    trainer = toy_trainer({"a": SPECS["a"]})
    sampler = toy_sampler(trainer)
    version, pool, architecture = sampler._versions["a"], trainer.pool, trainer.architecture
    lora = slot_lora(monkeypatch).SlotLora(architecture, 4, torch.device("cpu"))
    name = architecture.linear[0].name

    def bound() -> list[int]:
        pool.make_resident([version])
        lora.bind([(version, 2), (None, 1)], 4)
        return lora._addresses_M2G[0, :, 0].tolist()

    def lies() -> list[int]:
        return [weights.data_ptr() for weights in version.layout.views(version.compute_copy, name)]

    first, slot = bound(), version.slot
    assert first == lies()
    old_row_P = version.compute_copy  # keeps the memory allocated, so that no other block gets this address
    for adapter in pool._all():
        pool._page_out(adapter)
    second = bound()
    assert version.slot == slot
    assert old_row_P.data_ptr() != version.compute_copy.data_ptr()
    assert second == lies()


def test_tiles_cover_all_rows_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without adapter, and rows of padding, are in tiles too: kernels compute more than LoRA for them."""
    trainer = toy_trainer({"a": SPECS["a"]})
    sampler = toy_sampler(trainer)
    version, architecture = sampler._versions["a"], trainer.architecture
    trainer.pool.make_resident([version])
    lora = slot_lora(monkeypatch).SlotLora(architecture, 64, torch.device("cpu"))
    none, rank = 64, version.layout.rank
    lora.bind([(None, 3), (version, 20), (None, 1)], 48)
    expected = [
        [none, 0, 3, 0],
        [1, 3, 23, rank],
        [1, 19, 23, rank],
        [none, 23, 24, 0],
        [none, 24, 48, 0],
        [none, 40, 48, 0],
    ]
    assert lora._count_1.tolist() == [6]
    assert lora._tiles_N4[:6].tolist() == expected
    assert lora._addresses_M2G[:-1, :, 1].all()  # the adapter is on all linear layers but the head
    assert not lora._addresses_M2G[:, :, [0, 2, none]].any()
    lora.bind([(version, 1)] * 64, 64)  # each row may have its own version
    assert lora._count_1.tolist() == [64]
