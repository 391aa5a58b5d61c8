"""More adapters than fit on the device: which are resident, and that paging changes no result."""

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.models.reference import assert_logprobs_close, assert_tensors_close, random_datum, toy_llama
from twinkle.errors import AdapterExistsError, AdapterNotFoundError, CapacityError, InvalidInputError
from twinkle.model import AdamParams, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.adapters.adapter import PASS_BYTES_PER_PARAMETER, STATE_BYTES_PER_PARAMETER, Adapter
from twinkle.model.adapters.residency import AdapterPool
from twinkle.model.decoder.lora.stacks import SLOTS_PER_BLOCK, RowLayout, Target, initial_row

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
    taken = [state_bytes(a.layout) if a.whole_on_device else pass_bytes(a.layout) for a in resident]
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
    pool = AdapterPool(block_bytes(SMALL) + 4 * pass_bytes(SMALL), torch.float32, CPU)
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
    room = block_bytes(SMALL) + 3 * pass_bytes(SMALL) + state_bytes(SMALL)
    pool = AdapterPool(room, torch.float32, CPU)
    adapters = [add(pool, name, SMALL, seed) for seed, name in enumerate("abcd")]
    pool.make_resident(adapters)
    assert not any(adapter.whole_on_device for adapter in adapters)
    for adapter in (*adapters, adapters[1]):
        pool.make_resident([adapter], whole=True)
        assert pool.resident_ids() == ["a", "b", "c", "d"]
        assert [each.adapter_id for each in adapters if each.whole_on_device] == [adapter.adapter_id]
        assert_consistent(pool)
    pool.make_resident([add(pool, "e", SMALL)])  # the state of b leaves, and nobody else
    assert pool.resident_ids() == ["a", "b", "c", "d", "e"]
    assert not adapters[1].whole_on_device
    assert pool.fit(adapters)
    assert not pool.fit(adapters, whole=True)


@pytest.mark.parametrize("budget", [10, 33, 100, 1000])
def test_the_capacity_is_what_fits(budget: int) -> None:
    pool = AdapterPool(budget * row_bytes(SMALL), torch.float32, CPU)
    whole, for_passes = pool.capacity(SMALL)
    adapters = [add(pool, str(number), SMALL) for number in range(for_passes + 1)]
    assert pool.fit(adapters[:for_passes])
    assert not pool.fit(adapters)
    assert pool.fit(adapters[:whole], whole=True)
    assert not pool.fit(adapters[: whole + 1], whole=True)


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
    taken = [-(-count // SLOTS_PER_BLOCK) * block_bytes(layout) + count * pass_bytes(layout) for count in range(13)]
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
