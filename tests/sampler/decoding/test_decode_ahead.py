"""Decoding several tokens before the host reads them: which requests do so, and where their versions lie in memory.

The captured graphs need CUDA; here a stand-in computes the same tokens pass by pass.
"""

import ctypes
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec, module_from_spec
from itertools import count
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.support.models.sampling import (
    SPECS,
    assert_nothing_left,
    assert_same_samples,
    blocks,
    drain,
    prompt,
    request,
    run,
    toy_sampler,
    toy_trainer,
)
from tests.support.models.seeing_models import seeing_datum, seeing_model
from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.model import LoraSpec, Trainer
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.joined import SPARE_ROWS
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
        self._start = sampler._pass.start
        self._nobodys = sampler._cache.set_aside()
        self.shifts: set[int] = set()
        self.followed = 0  # rows that went on from a run whose tokens the host had not read
        self.unread = 0  # runs whose tokens the host has not read yet
        sampler._graphs = self
        sampler._pass.start_ahead = self.start_ahead

    def takes(self, version: Adapter | None) -> bool:
        return not any(version is other for other in self._refused)

    def start_ahead(self, rows: Sequence[Ahead], steps: int, before: "Drawing | None" = None) -> "Drawing":
        """Compute at once, as the device does in the order of its queue."""
        assert 0 < len(rows) <= self.max_rows
        self.runs.append(len(rows))
        self.shifts |= {row.shift for row in rows}
        results: list[list[Drawn]] = [[] for _ in rows]
        rows = [self._with_token(row, before) for row in rows]
        for step in range(steps):
            pieces = [self._piece(row, drawn, step) for row, drawn in zip(rows, results, strict=True)]
            for drawn, computed in zip(results, self._start(pieces).results(), strict=True):
                drawn.append(computed.drawn[0])
        self.unread += 1
        return Drawing(self, results)

    def _with_token(self, row: Ahead, before: "Drawing | None") -> Ahead:
        if row.follows is None:
            return row
        assert before is not None
        self.followed += 1
        return replace(row, token=before.tokens[row.follows][-1].token)

    def _piece(self, row: Ahead, drawn: list[Drawn], step: int) -> Piece:
        token, position = drawn[-1].token if drawn else row.token, row.position + step
        table = [*row.blocks, *[self._nobodys] * (blocks_for(position + 1) - len(row.blocks))]
        noise = uniform(row.seed, row.sample, row.drawn + step)
        draws = (replace(row.draw, uniform=noise),)
        return Piece(row.version, np.array([token]), position, table, draws, shift=row.shift, state=row.state)


@dataclass(frozen=True)
class Drawing:
    """Replaces a run that the device may still be computing."""

    captured: Captured
    tokens: list[list[Drawn]]

    def results(self) -> list[list[Drawn]]:
        self.captured.unread -= 1
        return self.tokens


@pytest.fixture(params=["attention", "linear attention"])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    return toy_trainer(None, None if request.param == "attention" else tiny_model("qwen3_5"))


def requests(length: int = 30) -> list[SampleRequest]:
    return [
        request(f"{name}", name, prompt(9 + 7 * n, n), 2, max_tokens=length + n, seed=n)
        for n, name in enumerate((None, *SPECS))
    ]


@pytest.mark.parametrize("max_rows", [3, 64])
def test_the_same_tokens_as_one_at_a_time(max_rows: int, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 60.0)
    expected = run(toy_sampler(trainer), requests())
    sampler = toy_sampler(trainer)
    captured = Captured(sampler, max_rows=max_rows)
    for name, result in run(sampler, requests()).items():
        assert_same_samples(result, expected[name])
    assert captured.runs
    assert bool(captured.followed) is (max_rows == 64)  # all sequences in one run: the next starts before it is read
    assert captured.unread == 0


def test_positions_behind_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference between index and position goes along, also in runs that go on from unread tokens."""
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 60.0)
    model = seeing_model("qwen3_vl")
    trainer = tiny_trainer(model)
    data = [seeing_datum(model, [(100, 96)] * number, number) for number in range(3)]
    asked = [
        replace(request(f"r{number}", None, datum.tokens, 2, max_tokens=30, seed=number), images=datum.images)
        for number, datum in enumerate(data)
    ]
    expected = run(toy_sampler(trainer), asked)
    sampler = toy_sampler(trainer)
    captured = Captured(sampler, max_rows=64)
    for name, result in run(sampler, asked).items():
        assert_same_samples(result, expected[name])
    assert captured.followed
    assert captured.shifts == {0, -6, -12}  # an image of 3 × 3 tokens takes three positions


def test_samples_that_end_or_arrive_while_the_device_draws(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples end at stop tokens, at their length and by being cancelled; others begin meanwhile."""
    asked = [
        request(f"r{n}", (None, *SPECS)[n % 4], prompt(5 + 3 * n, n), 1 + n % 3, max_tokens=1 + 7 * n, seed=n, **how)
        for n, how in enumerate([{}, {"stop_tokens": tuple(range(3, 20))}, {"temperature": 0.0}, {"top_k": 3}] * 3)
    ]
    expected = run(toy_sampler(trainer), asked)
    sampler = toy_sampler(trainer)
    captured = Captured(sampler, max_rows=64)
    outcomes, waiting = {}, list(asked)
    # Every call of the clock returns one second more.
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler.perf_counter", count().__next__)
    for seconds in [0, 3, 12] * 400:
        monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", seconds)
        if waiting:
            sampler.submit(waiting.pop())
            sampler.submit(request("cancelled", "a", prompt(20), 2, max_tokens=90, seed=1))
        outcomes |= {event.request_id: event.outcome for event in sampler.step()}
        assert captured.unread == 0
        sampler.cancel("cancelled")
        if not waiting and not sampler.busy:
            break
    assert captured.followed
    assert_nothing_left(sampler)
    for name, result in expected.items():
        assert_same_samples(outcomes[name], result)


@pytest.mark.parametrize("room", [12, 40])
def test_a_small_cache_and_few_places(room: int, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler.perf_counter", count().__next__)
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 6)
    asked = [
        replace(request(f"r{n}", "a", prompt(10 + 5 * n, n), 3, max_tokens=60, seed=n), scope=f"tenant {n % 3}")
        for n in range(5)
    ]
    expected = run(toy_sampler(trainer), asked)
    sampler = toy_sampler(trainer, kv_budget_bytes=blocks(toy_sampler(trainer), room), max_sequences=5)
    captured = Captured(sampler, max_rows=64)
    outcomes, waiting = {}, list(asked)
    while waiting or sampler.busy:
        if waiting:
            sampler.submit(waiting.pop())
        outcomes |= {event.request_id: event.outcome for event in sampler.step()}
    assert captured.runs
    assert_nothing_left(sampler)
    for name, result in expected.items():
        assert_same_samples(outcomes[name], result)


def test_tokens_of_preempted_sequences_are_dropped(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences lose their blocks while the device draws for them, and the blocks get other owners."""
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    expected = run(toy_sampler(trainer), requests())
    sampler = toy_sampler(trainer)
    captured = Captured(sampler, max_rows=64)
    for each in requests():
        sampler.submit(each)
    for _ in range(2):
        sampler.step()
    first = sampler._launch(captured, lambda _job: True, 3, None)
    second = sampler._launch(captured, lambda _job: True, 8, first)
    assert first is not None
    assert second is not None
    before = [list(step.sequence.tokens) for step in first.steps]
    sampler._schedule.preempt_all()
    sampler._schedule.admit(lambda _job: True)
    for sampler._flight in (first, second):
        sampler._land()
    assert [step.sequence.tokens for step in first.steps] == before
    outcomes = drain(sampler)
    for name, result in expected.items():
        assert_same_samples(outcomes[name], result)


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


def test_states_behind_drawn_tokens_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is ahead of the host, so a state may be behind more tokens than the host knows."""
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 60.0)
    trainer = toy_trainer(None, tiny_model("qwen3_5"))
    start = prompt(72, 3)
    first = request("first", "a", start, max_tokens=40, temperature=0.0)
    drawn = run(toy_sampler(trainer), [first])["first"].sequences[0].tokens
    longer = request("longer", "a", np.concatenate([start, drawn]), max_tokens=10, temperature=0.0)
    expected = run(toy_sampler(trainer), [longer])["longer"]
    sampler = toy_sampler(trainer)
    captured = Captured(sampler, max_rows=64)
    assert run(sampler, [first])["first"].sequences[0].tokens.tolist() == drawn.tolist()
    assert captured.followed
    result = run(sampler, [longer])["longer"]
    assert 0 < result.cached_prompt_tokens <= len(start)
    assert_same_samples(result, expected)


@pytest.mark.parametrize("max_rows", [3, 64])
def test_out_of_memory_ahead_is_nobodys_problem(
    max_rows: int, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._ROUNDS_WITHOUT_GRAPHS", 2)
    expected = run(toy_sampler(trainer), requests())
    sampler = toy_sampler(trainer)
    captured, refused = Captured(sampler, max_rows=max_rows), []

    def limited(rows: Sequence[Ahead], steps: int, before: Drawing | None = None) -> Drawing:
        if len(refused) % 3 == 0:
            refused.append(captured.start_ahead(rows, 3, before))  # it fails after three tokens
            raise torch.OutOfMemoryError("no more")
        refused.append(None)
        return captured.start_ahead(rows, steps, before)

    sampler._pass.start_ahead = limited
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
    kernels = SimpleNamespace(MAX_RANK=128, TILE_ROWS_OF_A=16, Tiles=None, Tiling=None, add_lora=None, usual_tiles=None)
    kernels.tile_rows_of_b, kernels.new_counters, kernels.copy_pieces = (lambda rows: 32), torch.zeros, copy_pieces
    package = "twinkle.sampler.torch_sampler.lora"
    monkeypatch.setitem(sys.modules, f"{package}.slot_lora_kernels", kernels)
    monkeypatch.setitem(sys.modules, f"{package}.spare_rows", loaded(f"{package}.spare_rows"))
    return loaded(f"{package}.slot_lora")


def loaded(name: str) -> ModuleType:
    """Load a module without a place in ``sys.modules``."""
    spec = find_spec(name)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_pieces(table_E3: torch.Tensor, like: torch.Tensor) -> None:
    """Copy as the kernel does."""
    for source, target, elements in table_E3.tolist():
        ctypes.memmove(target, source, elements * like.itemsize)


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
        return lora._addresses_M2N[0, :, 0].tolist()

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
    rank = version.layout.rank
    lora.bind([(None, 3), (version, 20), (None, 1)], 48)
    of_a = [[0, 3, 0, 0], [3, 23, rank, 0], [19, 23, rank, 0], [23, 24, 0, 0], [24, 48, 0, 0], [40, 48, 0, 0]]
    of_b = [[0, 3, 0, 0], [3, 23, rank, 0], [23, 24, 0, 0], [24, 48, 0, 0]]
    assert lora._counts_2.tolist() == [6, 4]
    assert lora._tiles_2N4[0, :6].tolist() == of_a
    assert lora._tiles_2N4[1, :4].tolist() == of_b
    assert lora._addresses_M2N[:-1, 0, 1:3].all()  # the adapter is on all linear layers but the head
    assert lora._addresses_M2N[:-1, 1, 1].all()
    assert not lora._addresses_M2N[:, 0, [0, 3, 4, 5]].any()
    assert not lora._addresses_M2N[:, 1, [0, 2, 3]].any()
    lora.bind([(version, 1)] * 64, 64)  # each row may have its own version
    assert lora._counts_2.tolist() == [64, 64]


def test_spare_rows_hold_the_versions_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other passes left there is replaced; more ranks than there is room for are left to the kernels."""
    ranks = {"a": 8, "b": 64, "c": 16, "wide": 128}
    trainer = toy_trainer({name: LoraSpec(rank=rank, seed=rank, train_mlp=name != "c") for name, rank in ranks.items()})
    versions = {name: trainer.pool.freeze(name) for name in ranks}
    trainer.pool.make_resident(versions.values())
    lora = slot_lora(monkeypatch).SlotLora(trainer.architecture, 24, torch.device("cpu"))
    assert not lora.has_spare_rows
    assert not lora.bind([(versions["a"], 2)], 24)
    targets = trainer.architecture.projections
    rows = {each.name: torch.zeros(SPARE_ROWS, each.in_features) for each in targets}
    lora.use_spare_rows(rows)
    assert lora.has_spare_rows

    def bound(*names: str) -> bool:
        return lora.bind([(versions[each], 2) for each in names], 24)

    def a_of(name: str, target: str) -> torch.Tensor:
        return versions[name].layout.views(versions[name].compute_copy, target)[0]

    def tiles(count: int) -> list[list[int]]:
        assert torch.equal(lora._tiles_2N4[0, :count], lora._tiles_2N4[1, :count])
        return lora._tiles_2N4[0, :count].tolist()

    assert bound("b", "c", "b", "a")
    for target in targets:
        mlp = "mlp" in target.name
        assert torch.equal(rows[target.name][:64], a_of("b", target.name))
        assert mlp or torch.equal(rows[target.name][64:80], a_of("c", target.name))
        assert not mlp or not rows[target.name][64:80].any()  # nothing of c
        assert torch.equal(rows[target.name][80:88], a_of("a", target.name))
        assert not rows[target.name][88:].any()
    assert tiles(4) == [[0, 2, 64, 0], [2, 4, 16, 64], [4, 6, 64, 0], [6, 8, 8, 80]]
    target = targets[0].name
    rows[target].zero_()
    assert bound("a")  # it is there already, so nothing is copied
    assert not rows[target].any()
    assert tiles(1) == [[0, 2, 8, 80]]
    assert not bound("wide", "a")
    assert tiles(2) == [[0, 2, 128, 0], [2, 4, 8, 0]]
    assert bound("wide")
    assert torch.equal(rows[target], a_of("wide", target))
    assert bound("c", "a")
    assert torch.equal(rows[target][:24], torch.cat([a_of("c", target), a_of("a", target)]))


def test_spare_rows_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a copy fails, nobody takes the rows for those that were there, and the tables are written again."""
    trainer = toy_trainer({name: LoraSpec(rank=8, seed=seed) for seed, name in enumerate("ab")})
    versions = {name: trainer.pool.freeze(name) for name in "ab"}
    trainer.pool.make_resident(versions.values())
    module = slot_lora(monkeypatch)
    lora = module.SlotLora(trainer.architecture, 8, torch.device("cpu"))
    targets = trainer.architecture.projections
    rows = {each.name: torch.zeros(SPARE_ROWS, each.in_features) for each in targets}
    lora.use_spare_rows(rows)
    target = targets[0].name
    a_of_a = versions["a"].layout.views(versions["a"].compute_copy, target)[0]

    def bind_a() -> bool:
        return lora.bind([(versions["a"], 2)], 8)

    def run_out(table_E3: torch.Tensor, like: torch.Tensor) -> None:
        copy_pieces(table_E3[: len(table_E3) // 2], like)
        raise torch.OutOfMemoryError

    assert bind_a()
    spare_rows = sys.modules["twinkle.sampler.torch_sampler.lora.spare_rows"]
    with monkeypatch.context() as patch:
        patch.setattr(spare_rows, "copy_pieces", run_out)
        with pytest.raises(torch.OutOfMemoryError):
            lora.bind([(versions["b"], 2)], 8)
    assert not torch.equal(rows[target][:8], a_of_a)
    assert bind_a()
    assert torch.equal(rows[target][:8], a_of_a)
    with monkeypatch.context() as patch:
        patch.setattr(module, "to_device", Mock(side_effect=[torch.zeros(1, 4), torch.OutOfMemoryError]))
        with pytest.raises(torch.OutOfMemoryError):
            lora.bind([(None, 8)], 8)
    assert lora._tiles_2N4[0, 0].tolist() == [0, 0, 0, 0]
    bind_a()
    assert lora._tiles_2N4[0, 0].tolist() == [0, 2, 8, 0]


def test_a_version_that_is_gone_has_no_spare_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version may get the place in memory of an old one."""
    trainer = toy_trainer(
        {"a": LoraSpec(rank=8, seed=1), "head": LoraSpec(rank=8, train_mlp=False, train_attn=False, train_unembed=True)}
    )
    lora = slot_lora(monkeypatch).SlotLora(trainer.architecture, 8, torch.device("cpu"))
    lora.use_spare_rows(
        {each.name: torch.zeros(SPARE_ROWS, each.in_features) for each in trainer.architecture.projections}
    )
    version = trainer.pool.freeze("a")
    trainer.pool.make_resident([version])
    assert lora.bind([(version, 2)], 8)
    held = lora._spare_rows._held
    assert held[0][0]() is version
    trainer.pool.remove_version(version)
    del version
    gc.collect()
    assert held[0][0]() is None
    other = trainer.pool.freeze("head")  # nothing to copy: it has LoRA on the head alone
    trainer.pool.make_resident([other])
    assert lora.bind([(other, 2)], 8)
