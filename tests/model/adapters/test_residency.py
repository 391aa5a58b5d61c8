"""More adapters than fit on the device: which are resident, and that paging changes no result."""

import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tests.support.models.reference import assert_logprobs_close, assert_tensors_close, random_datum, toy_llama
from twinkle.errors import AdapterExistsError, AdapterNotFoundError, CapacityError, InvalidInputError
from twinkle.model import AdamParams, LoraSpec, Trainer, TrainFailure, TrainItem, TrainResult
from twinkle.model.adapters.adapter import (
    PASS_BYTES_PER_PARAMETER,
    ROW_BYTES_PER_PARAMETER,
    STATE_BYTES_PER_PARAMETER,
    Adapter,
)
from twinkle.model.adapters.optimizer import adam_step
from twinkle.model.adapters.residency import AdapterPool
from twinkle.model.decoder.lora.stacks import SLOTS_PER_BLOCK, RowLayout, Target, initial_row
from twinkle.model.trainer.batch import Part

MakeTrainer = Callable[..., Trainer]
BASE = toy_llama()
CPU = torch.device("cpu")

SMALL = RowLayout(8, (Target("x", 16, 16),))
LARGE = RowLayout(32, (Target("x", 16, 16), Target("y", 16, 8)))


def row_bytes(layout: RowLayout) -> int:
    return 4 * layout.size


def state_bytes(layout: RowLayout) -> int:
    return STATE_BYTES_PER_PARAMETER * layout.size


def pass_bytes(layout: RowLayout) -> int:
    return PASS_BYTES_PER_PARAMETER * layout.size


def idle_bytes(layout: RowLayout) -> int:
    """Return what a resident adapter takes between passes."""
    return ROW_BYTES_PER_PARAMETER * layout.size


def block_bytes(layout: RowLayout) -> int:
    return SLOTS_PER_BLOCK * row_bytes(layout)


def add(pool: AdapterPool, adapter_id: str, layout: RowLayout, seed: int = 0) -> Adapter:
    spec = LoraSpec(layout.rank - 1, seed=seed)
    row_P = initial_row(layout, [spec.rank] * len(layout.targets), seed)
    row_P[layout.a_size :] = torch.randn(layout.size - layout.a_size, generator=torch.Generator().manual_seed(seed))
    adapter = Adapter.fresh(adapter_id, spec, pool.stack_for(layout), row_P)
    pool.add(adapter)
    return adapter


def assert_consistent(pool: AdapterPool) -> None:
    """Check that memory is within the budget and that each resident adapter has one slot with its weights, B scaled."""
    adapters = [pool.get(adapter_id) for adapter_id in pool.ids()]
    resident = [adapter for adapter in adapters if adapter.slot is not None]
    assert pool.resident_ids() == [adapter.adapter_id for adapter in resident]
    stacks = {id(adapter.stack): adapter.stack for adapter in adapters}.values()
    assert not any(adapter.held for adapter in adapters)
    taken = [state_bytes(a.layout) if a.whole_on_device else idle_bytes(a.layout) for a in resident]
    used = sum(stack.allocated_bytes for stack in stacks) + sum(taken)
    assert not any(adapter.whole_on_device for adapter in adapters if adapter.slot is None)
    assert used <= pool.budget_bytes
    places = [(id(adapter.stack), adapter.slot) for adapter in resident]
    assert len(set(places)) == len(places)
    for adapter in resident:
        row_P, split = adapter.stack.row(adapter.slot), adapter.layout.a_size
        assert torch.equal(row_P[:split], adapter.weights_P[:split])
        assert torch.equal(row_P[split:], adapter.weights_P[split:] * adapter.spec.scaling)


# --- the pool ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_uses_stays_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    budget = block_bytes(LARGE) + 2 * state_bytes(LARGE) + rng.randint(1, 3) * block_bytes(SMALL)
    pool = AdapterPool(budget, torch.float32, CPU)
    weights = {}
    for number in range(30):
        adapter = add(pool, str(number), rng.choice([SMALL, SMALL, LARGE]), seed=number)
        weights[adapter.adapter_id] = adapter.weights_P.clone()
    for _ in range(60):
        action, names = rng.random(), pool.ids()
        if action < 0.1 and len(names) > 5:
            name = rng.choice(names)
            pool.remove(name)
            del weights[name]
        else:
            wanted = [pool.get(name) for name in rng.sample(names, rng.randint(1, 5))]
            while not pool.fit(wanted):
                wanted.pop()
            pool.make_resident(wanted)
            assert all(adapter.slot is not None for adapter in wanted)
            if rng.random() < 0.5:
                pool.make_resident(wanted[:1], whole=True)
                assert all(adapter.whole_on_device for adapter in wanted[:1])
        assert_consistent(pool)
    for name, row_P in weights.items():
        assert torch.equal(pool.get(name).weights_P, row_P)


def test_the_least_recently_used_leaves_first() -> None:
    pool = AdapterPool(block_bytes(SMALL) + 4 * idle_bytes(SMALL), torch.float32, CPU)
    a, b, c, d, e = (add(pool, name, SMALL) for name in "abcde")
    for adapter in (a, b, c, d):
        pool.make_resident([adapter])
    assert pool.resident_ids() == ["a", "b", "c", "d"]
    pool.make_resident([a])
    pool.make_resident([e])
    assert pool.resident_ids() == ["a", "c", "d", "e"]
    pool.make_resident([b, c])
    assert pool.resident_ids() == ["a", "b", "c", "e"]


def test_optimizer_states_leave_before_adapters() -> None:
    """A step brings weights and state of one adapter; those of others make room, while their compute copies stay."""
    room = 4 * row_bytes(SMALL) + 3 * idle_bytes(SMALL) + state_bytes(SMALL)
    pool = AdapterPool(room, torch.float32, CPU)
    adapters = [add(pool, name, SMALL, seed) for seed, name in enumerate("abcd")]
    for adapter in adapters:
        pool.make_resident([adapter])
    assert not any(adapter.whole_on_device for adapter in adapters)
    for adapter in (*adapters, adapters[1]):
        pool.make_resident([adapter], whole=True)
        assert pool.resident_ids() == ["a", "b", "c", "d"]
        assert [each.adapter_id for each in adapters if each.whole_on_device] == [adapter.adapter_id]
        assert_consistent(pool)
    pool.make_resident([adapters[0]], trains=True)
    adapters[0].add_gradient(torch.ones(SMALL.size))
    pool.make_resident([adapters[0]], trains=True)  # the state of b leaves, and nobody else
    assert pool.resident_ids() == ["a", "b", "c", "d"]
    assert not adapters[1].whole_on_device
    assert pool.fit(adapters[:3])
    assert not pool.fit(adapters, whole=True)


@pytest.mark.parametrize("budget", [10, 33, 100, 1000])
def test_the_capacity_is_what_fits(budget: int) -> None:
    pool = AdapterPool(budget * row_bytes(SMALL), torch.float32, CPU)
    whole, idle = pool.capacity(SMALL)
    adapters = [add(pool, str(number), SMALL) for number in range(idle + 1)]
    for adapter in adapters:
        pool.make_resident([adapter])
    assert pool.resident_ids() == [str(number) for number in range(1, idle + 1)]
    assert pool.fit(adapters[:whole], whole=True)
    assert not pool.fit(adapters[: whole + 1], whole=True)


def test_a_second_gradient_needs_room() -> None:
    """An adapter always has room for one. A pass that adds to it, while others have theirs, pages an idle one out."""
    pool = AdapterPool(4 * row_bytes(SMALL) + 4 * idle_bytes(SMALL), torch.float32, CPU)
    a, b, c, d = (add(pool, name, SMALL) for name in "abcd")
    for adapter in (a, b, c, d):
        pool.make_resident([adapter], trains=True)
    assert pool.resident_ids() == ["a", "b", "c", "d"]
    c.add_gradient(torch.ones(SMALL.size))
    pool.make_resident([c])  # a forward pass adds nothing
    assert pool.resident_ids() == ["a", "b", "c", "d"]
    pool.make_resident([c], trains=True)
    c.held += 1
    assert pool.resident_ids() == ["b", "c", "d"]
    assert c.device_bytes == pass_bytes(SMALL)
    b.held += 1  # its first, for which it has room
    assert b.device_bytes == idle_bytes(SMALL)
    pool.make_resident([b, d], trains=True)
    assert pool.resident_ids() == ["b", "d"]  # c was used less recently


def test_where_a_step_finds_weights_and_state() -> None:
    """States leave for another one only if they were not used since the other's last step."""
    pool = AdapterPool(block_bytes(SMALL) + idle_bytes(SMALL) + 2 * state_bytes(SMALL), torch.float32, CPU)
    a, b, c = (add(pool, name, SMALL) for name in "abc")
    assert all(map(pool.has_room_for_state, (a, b, c)))
    for adapter in (a, b):
        pool.make_ready_to_step(adapter)
    pool.make_resident([c])
    assert pool.resident_ids() == ["a", "b", "c"]
    for adapter in (a, b, c, a, b, c, b):  # in turn: c does not move the others' state
        assert pool.has_room_for_state(adapter) == (adapter is not c)
        adapter.stepped = next(pool._clock)
    assert pool.has_room_for_state(c)  # a has not stepped since c did
    pool.make_ready_to_step(c)
    assert [each.whole_on_device for each in (a, b, c)] == [False, True, True]
    assert_consistent(pool)


@pytest.mark.parametrize("alphas", [{}, {"y": 8}])
@pytest.mark.parametrize("part", [1, 100, LARGE.a_size, LARGE.size, 2 * LARGE.size])
def test_a_step_in_parts_is_a_step(part: int, alphas: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.model.adapters.optimizer._PART", part)
    params = AdamParams(learning_rate=0.1, weight_decay=0.1, grad_clip_norm=0.5)
    found = []
    for in_parts in (False, True):
        pool = AdapterPool(2 * block_bytes(LARGE) + state_bytes(LARGE), torch.float32, CPU)
        spec = LoraSpec(LARGE.rank, seed=0, alpha=16, alpha_pattern=alphas)
        adapter = Adapter.fresh("a", spec, pool.stack_for(LARGE), initial_row(LARGE, [LARGE.rank] * 2, 0, False))
        pool.add(adapter)
        for step in range(3):
            pool.make_resident([adapter], whole=not in_parts)
            adapter.add_gradient(torch.randn(LARGE.size, generator=torch.Generator().manual_seed(step)))
            metrics = adam_step(adapter, params, in_parts=in_parts)
            assert metrics["unclipped_grad_l2:mean"] > 1
            assert adapter.gradient_P is None
        assert adapter.step == 3
        found.append([adapter.weights_P, adapter.exp_avg_P, adapter.exp_avg_sq_P, adapter.compute_copy])
        assert not torch.equal(adapter.compute_copy, adapter.weights_P)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_a_step_in_parts_is_bit_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.model.adapters.optimizer._PART", 1000)
    params = AdamParams(learning_rate=0.1, weight_decay=0.1, grad_clip_norm=0.5)
    found = []
    for budget in (0, 2 * state_bytes(LARGE)):  # the first has no room for weights and state
        room = block_bytes(LARGE) // 2 + budget + state_bytes(LARGE)
        pool = AdapterPool(room, torch.bfloat16, torch.device("cuda"))
        adapter, other = add(pool, "a", LARGE, 1), add(pool, "b", LARGE, 2)
        pool.make_ready_to_step(other)
        for step in range(3):
            pool.make_resident([adapter])
            gradient_P = torch.randn(LARGE.size, generator=torch.Generator().manual_seed(step))
            adapter.add_gradient(gradient_P.cuda())
            in_parts = pool.make_ready_to_step(adapter, may_be_in_parts=True)
            assert in_parts == (budget == 0)
            adam_step(adapter, params, in_parts=in_parts)
            if budget == 0:
                assert adapter.weights_P.is_pinned()
                pool.make_ready_to_step(other)  # it was used since: next time, its state does not leave either
        pool.make_resident([adapter])
        found.append([adapter.weights_P, adapter.exp_avg_P, adapter.exp_avg_sq_P, adapter.compute_copy])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_states_are_in_host_memory_until_a_step() -> None:
    room = block_bytes(SMALL) // 2 + pass_bytes(SMALL) + state_bytes(SMALL)  # for the state of one of them
    pool = AdapterPool(room, torch.float32, torch.device("cuda"))
    first, second = add(pool, "first", SMALL, 1), add(pool, "second", SMALL, 2)
    before = first.weights_P.clone()
    pool.make_resident([first, second])
    first.add_gradient(torch.ones(SMALL.size, device="cuda"))
    assert first.weights_P.device.type == "cpu"
    assert first.gradient_P is not None
    assert first.gradient_P.is_cuda
    assert torch.equal(first.compute_copy.cpu()[: SMALL.a_size], before[: SMALL.a_size])
    pool.make_resident([first], whole=True)
    assert first.weights_P.is_cuda
    assert first.exp_avg_P.is_cuda
    pool.make_resident([second], whole=True)
    assert second.weights_P.is_cuda
    assert first.weights_P.device.type == "cpu"
    assert first.weights_P.is_pinned()
    assert torch.equal(first.weights_P, before)
    assert first.compute_copy.is_cuda


def test_one_large_adapter_does_not_take_the_room_of_eight() -> None:
    pool = AdapterPool(3 * row_bytes(LARGE) + state_bytes(LARGE), torch.float32, CPU)
    large = add(pool, "large", LARGE)
    pool.make_resident([large], whole=True)
    assert large.stack.slots < SLOTS_PER_BLOCK
    assert_consistent(pool)
    with pytest.raises(
        CapacityError, match=r"'large' needs 0 MiB .*0\.0 million parameters of rank 32\), 0 MiB are set"
    ):
        add(AdapterPool(state_bytes(LARGE), torch.float32, CPU), "large", LARGE)


def test_rows_scattered_over_blocks_are_brought_together() -> None:
    """Two of nine adapters lie in different blocks; with a third adapter they fit only if both move into one block."""
    slots = SLOTS_PER_BLOCK
    small = block_bytes(SMALL) + 2 * state_bytes(SMALL)
    pool = AdapterPool(
        max(small + block_bytes(LARGE) + state_bytes(LARGE), 2 * block_bytes(SMALL) + (slots + 1) * state_bytes(SMALL)),
        torch.float32,
        CPU,
    )
    adapters = [add(pool, str(number), SMALL, number) for number in range(slots + 1)]
    large = add(pool, "large", LARGE)
    pool.make_resident(adapters)
    assert len(pool.resident_ids()) == slots + 1
    assert adapters[0].stack.allocated_bytes == 2 * block_bytes(SMALL)
    wanted = [adapters[0], adapters[-1], large]
    assert pool.fit(wanted)
    pool.make_resident(wanted)
    assert {"0", str(slots), "large"} <= set(pool.resident_ids())
    assert_consistent(pool)


def test_an_empty_slot_holds_nothing() -> None:
    pool = AdapterPool(2 * (block_bytes(SMALL) + 2 * state_bytes(SMALL)), torch.float32, CPU)
    old, neighbour = add(pool, "old", SMALL, 1), add(pool, "neighbour", SMALL, 2)
    pool.make_resident([old, neighbour])
    slot = old.slot
    pool.remove("old")
    assert not neighbour.stack.row(slot).any()
    new = add(pool, "new", SMALL, 3)
    pool.make_resident([new])
    assert new.slot == slot
    assert_consistent(pool)


def test_memory_is_given_back() -> None:
    pool = AdapterPool(10 * block_bytes(LARGE), torch.float32, CPU)
    adapters = [add(pool, str(number), SMALL) for number in range(SLOTS_PER_BLOCK + 1)]
    pool.make_resident(adapters)
    stack = adapters[0].stack
    assert stack.allocated_bytes == 2 * block_bytes(SMALL)
    pool.remove(str(SLOTS_PER_BLOCK))
    assert stack.allocated_bytes == block_bytes(SMALL)
    for number in range(SLOTS_PER_BLOCK):
        pool.remove(str(number))
    assert stack.allocated_bytes == 0
    assert pool.ids() == []


def test_blocks_do_not_move() -> None:
    """Compiled code and CUDA graphs keep addresses."""
    pool = AdapterPool(10 * block_bytes(LARGE), torch.float32, CPU)
    first = add(pool, "first", SMALL)
    pool.make_resident([first])
    address = first.stack.row(first.slot).data_ptr()
    others = [add(pool, str(number), SMALL) for number in range(3 * SLOTS_PER_BLOCK)]
    pool.make_resident(others)
    for number in range(2 * SLOTS_PER_BLOCK):
        pool.remove(str(number))
    assert first.stack.row(first.slot).data_ptr() == address


def test_names_in_the_pool() -> None:
    pool = AdapterPool(10 * block_bytes(LARGE), torch.float32, CPU)
    add(pool, "a", SMALL)
    assert "a" in pool
    with pytest.raises(AdapterExistsError):
        add(pool, "a", LARGE)
    with pytest.raises(AdapterNotFoundError):
        pool.remove("b")
    with pytest.raises(CapacityError, match="'huge'"):
        add(pool, "huge", RowLayout(512, (Target("x", 10_000, 10_000),)))
    assert pool.ids() == ["a"]


# --- the trainer ------------------------------------------------------------------------------------------------------

SPECS = {
    "a": LoraSpec(8, seed=0),
    "b": LoraSpec(8, seed=1),
    "c": LoraSpec(5, seed=2),
    "d": LoraSpec(16, seed=3, train_mlp=False),
    "e": LoraSpec(16, seed=4, train_mlp=False),
    "f": LoraSpec(8, seed=5, train_unembed=True),
}


def with_adapters(make_trainer: MakeTrainer, fitting: int | None) -> Trainer:
    """Return a trainer with all of ``SPECS`` and room for about ``fitting`` adapters of rank 8 (None: for all)."""
    trainer = make_trainer(BASE)
    for adapter_id, spec in SPECS.items():
        trainer.create_adapter(adapter_id, spec)
    if fitting is not None:
        layout = trainer._pool.get("f").layout  # the largest
        trainer._pool.budget_bytes = block_bytes(layout) + fitting * state_bytes(layout)
    return trainer


def item(adapter_id: str, step: int) -> TrainItem:
    return TrainItem(adapter_id, [random_datum(BASE, "cross_entropy", length, seed=step) for length in (11, 6)])


def test_training_in_turns_is_the_same_with_paging_bit_for_bit(make_trainer: MakeTrainer) -> None:
    """Each call trains one adapter, so all batches are the same. Windows stay open while their adapter is paged out."""
    paged, roomy = with_adapters(make_trainer, fitting=2), with_adapters(make_trainer, fitting=None)
    for step in range(4):
        for adapter_id in SPECS:
            (ours,), (theirs,) = (t.forward_backward([item(adapter_id, step)]) for t in (paged, roomy))
            assert ours.metrics == theirs.metrics
            np.testing.assert_array_equal(ours.logprobs[0], theirs.logprobs[0])
            assert adapter_id in paged.resident_adapter_ids()
            assert len(paged.resident_adapter_ids()) <= 4
            assert_consistent(paged._pool)
        if step % 2 == 1:
            for adapter_id in reversed(SPECS):
                metrics = [t.optim_step(adapter_id, AdamParams(learning_rate=1e-2)) for t in (paged, roomy)]
                assert metrics[0] == metrics[1]
                assert_consistent(paged._pool)
    assert len(roomy.resident_adapter_ids()) == 6
    for adapter_id in SPECS:
        ours, theirs = paged.snapshot(adapter_id), roomy.snapshot(adapter_id)
        np.testing.assert_array_equal(ours.weights, theirs.weights)
        np.testing.assert_array_equal(ours.exp_avg_sq, theirs.exp_avg_sq)
        assert ours.step == theirs.step == 2


def test_a_call_of_more_adapters_than_fit_is_cut(make_trainer: MakeTrainer) -> None:
    """Also if the sequences of one request are computed while other adapters are paged in and out."""
    paged, roomy = with_adapters(make_trainer, fitting=2), with_adapters(make_trainer, fitting=None)
    for step in range(3):
        items = [item(adapter_id, step) for adapter_id in SPECS]
        items += [item("a", step + 10), item("f", step + 20)]
        for ours, theirs in zip(*(t.forward_backward(items) for t in (paged, roomy)), strict=True):
            assert isinstance(ours, TrainResult)
            assert_logprobs_close(ours.logprobs, theirs.logprobs)
        assert_consistent(paged._pool)
        assert len(paged.resident_adapter_ids()) < 6
        for adapter_id in SPECS:
            assert_tensors_close(paged.gradients(adapter_id), roomy.gradients(adapter_id))
            for trainer in (paged, roomy):
                trainer.optim_step(adapter_id, AdamParams(learning_rate=1e-2, eps=1.0))
            assert_tensors_close(paged.weights(adapter_id), roomy.weights(adapter_id))


def test_gradients_of_running_calls_are_counted_until_their_end(make_trainer: MakeTrainer) -> None:
    """Also if a call ends in the middle, if memory runs out, and if a request fails."""
    trainer = with_adapters(make_trainer, fitting=None)
    a, b = (trainer._pool.get(name) for name in "ab")
    steps = trainer.in_steps([item("a", 0), item("b", 0)], train=True, limit=lambda: 7)
    seen = []
    for _ in steps:
        seen.append((a.held, b.held))
        assert a.resident_bytes == max(1, min(2, a.held + (a.gradient_P is not None))) * idle_bytes(a.layout)
    assert seen == [(1, 0), (0, 0), (0, 1)]  # two sequences each: the first is held until the second is done
    (result,) = trainer.forward_backward([item("a", 1)])
    assert isinstance(result, TrainResult)
    assert (a.held, a.resident_bytes) == (0, idle_bytes(a.layout))
    steps = trainer.in_steps([item("a", 2)], train=True, limit=lambda: 7)
    next(steps)
    assert (a.held, a.resident_bytes) == (1, pass_bytes(a.layout))
    steps.close()
    assert a.held == 0
    inner = trainer._engine.forward_backward

    def limited(parts: Sequence[Part], **options: object) -> object:
        assert a.held == 1
        if sum(sum(part.lengths) for part in parts) > 6:
            raise torch.OutOfMemoryError("no more")
        return inner(parts, **options)

    trainer._engine.forward_backward = limited
    (result,) = trainer.forward_backward([item("a", 3)])  # its sequence of 11 tokens never fits
    assert isinstance(result, TrainFailure)
    assert a.held == 0

    def failing(parts: Sequence[Part], **options: object) -> object:
        raise RuntimeError("the device is gone")

    trainer._engine.forward_backward = failing
    with pytest.raises(RuntimeError, match="the device is gone"):
        trainer.forward_backward([item("a", 4)])
    assert a.held == 0


def test_reading_state_brings_nobody_in(make_trainer: MakeTrainer) -> None:
    trainer = with_adapters(make_trainer, fitting=2)
    trainer.forward_backward([item(adapter_id, 0) for adapter_id in SPECS])
    before = trainer.resident_adapter_ids()
    for adapter_id in SPECS:
        trainer.weights(adapter_id)
        assert trainer.gradients(adapter_id) != {}
        trainer.snapshot(adapter_id)
        trainer.zero_grad(adapter_id)
    assert trainer.resident_adapter_ids() == before


def test_the_memory_budget_limits_residents(make_trainer: MakeTrainer) -> None:
    weights = sum(parameter.numel() * 4 for parameter in BASE.parameters())
    trainer = make_trainer(BASE, memory_budget_bytes=weights + 4 * 2**20)
    assert trainer.memory.adapters < 4 * 2**20
    names = [str(number) for number in range(12)]
    for number, name in enumerate(names):
        trainer.create_adapter(name, LoraSpec(8, seed=number))
    for name in names:
        (result,) = trainer.forward_backward([item(name, 0)])
        assert isinstance(result, TrainResult)
    layout = trainer._pool.get("0").layout
    taken = [-(-count // SLOTS_PER_BLOCK) * block_bytes(layout) + count * idle_bytes(layout) for count in range(13)]
    room = max(count for count in range(13) if taken[count] <= trainer.memory.adapters)
    assert 0 < room < 12
    assert trainer.resident_adapter_ids() == names[-room:]
    assert_consistent(trainer._pool)


def test_an_adapter_that_can_never_fit_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = with_adapters(make_trainer, fitting=2)
    with pytest.raises(CapacityError, match=r"'huge' needs .* MiB"):
        trainer.create_adapter("huge", LoraSpec(512, seed=0))
    with pytest.raises(InvalidInputError, match=r"rank: got 512, .*needs .* MiB on the device"):
        trainer.check_adapter(LoraSpec(512))
    trainer.check_adapter(LoraSpec(8))
    assert trainer.adapter_ids() == list(SPECS)
    (result,) = trainer.forward_backward([item("a", 0)])
    assert isinstance(result, TrainResult)


def test_the_report_says_how_many_adapters_fit(make_trainer: MakeTrainer) -> None:
    weights = sum(parameter.numel() * 4 for parameter in BASE.parameters())
    trainer = make_trainer(BASE, memory_budget_bytes=weights + 8 * 2**20)
    said = trainer.memory_report()
    report = re.search(r"fit the device: (\d+) of rank 8 with optimizer states, (\d+) without; (\d+)", said)
    assert report is not None
    trainer.create_adapter("a", LoraSpec(8))
    layout = trainer._pool.get("a").layout
    assert (int(report[1]), int(report[2])) == trainer._pool.capacity(layout)
    assert int(report[3]) < int(report[1]) < int(report[2])
    assert "the host's memory limits adapters" in make_trainer(BASE).memory_report()


def test_a_snapshot_that_cannot_fit_leaves_the_adapter_as_it_was(make_trainer: MakeTrainer) -> None:
    roomy = with_adapters(make_trainer, fitting=None)
    roomy.create_adapter("huge", LoraSpec(512, seed=0))
    trainer = with_adapters(make_trainer, fitting=2)
    before = trainer.snapshot("a")
    with pytest.raises(CapacityError):
        trainer.restore("a", roomy.snapshot("huge"))
    assert trainer.adapter_ids() == list(SPECS)
    np.testing.assert_array_equal(trainer.snapshot("a").weights, before.weights)
