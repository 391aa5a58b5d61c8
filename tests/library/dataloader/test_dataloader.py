"""Data loaders: batches, slices, epochs, resuming, rows that fail."""

import os
import random
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice

import pytest
import torch

from tests.support.paths import ROOT
from twinkle import DeviceMesh
from twinkle.dataloader import DataLoader, DeviceMeshIterableFetcher, DeviceMeshSampler, RetrySampler
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset
from twinkle.errors import DataError, InvalidInputError, StreamError, UnknownNameError
from twinkle.processor import InputProcessor


@dataclass
class Mesh:
    """Contiguous slices; the first ranks get one row more."""

    data_world_size: int
    data_rank: int

    def get_slice(self, total_length):
        base, more = divmod(total_length, self.data_world_size)
        start = self.data_rank * base + min(self.data_rank, more)
        return slice(start, start + base + (self.data_rank < more))


def table(count=10):
    return Dataset(DatasetMeta(data=[{"x": n} for n in range(count)]))


def stream(count=10):
    return IterableDataset(DatasetMeta(data=[{"x": n} for n in range(count)]))


def xs(batches):
    return [[row["x"] for row in batch] for batch in batches]


def flat(batches):
    return [x for batch in batches for x in batch]


@pytest.mark.parametrize("make", [table, stream])
def test_batches_in_order(make):
    loader = DataLoader(make(), batch_size=4)
    assert xs(loader) == xs(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert xs(DataLoader(make(), batch_size=4, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # the dataset may be a callable
    assert xs(DataLoader(make, batch_size=4, min_batch_size=3)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert xs(DataLoader(make(2), batch_size=4)) == [[0, 1]]
    assert xs(DataLoader(make(2), batch_size=4, drop_last=True)) == []


def test_length():
    assert len(DataLoader(table(), batch_size=4)) == 3
    assert len(DataLoader(table(), batch_size=4, drop_last=True)) == 2
    assert len(DataLoader(table(), batch_size=5)) == 2
    with pytest.raises(StreamError):
        len(DataLoader(stream(), batch_size=4))


@pytest.mark.parametrize("make", [table, stream])
def test_each_process_gets_its_part_of_every_batch(make):
    whole = xs(DataLoader(make(11), batch_size=4, min_batch_size=3))
    parts = [xs(DataLoader(make(11), batch_size=4, device_mesh=Mesh(2, rank), min_batch_size=3)) for rank in (0, 1)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert parts[0][-1] == [8, 9]
    # by default every process must get a row
    assert len(xs(DataLoader(make(9), batch_size=4, device_mesh=Mesh(2, 0)))) == 2


@pytest.mark.parametrize("make", [table, stream])
def test_the_driver_of_a_ray_cluster_gets_whole_batches(make, monkeypatch):
    """A model divides them among its workers. In a worker, which has a rank, a loader gives the worker's part."""
    mesh = DeviceMesh.from_sizes(fsdp_size=2)
    monkeypatch.setenv("TWINKLE_MODE", "ray")
    assert xs(DataLoader(make(8), batch_size=4, device_mesh=mesh)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(InvalidInputError, match="batch_size: got 3, allowed: a multiple of 2"):
        DataLoader(make(8), batch_size=3, device_mesh=mesh)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert xs(DataLoader(make(8), batch_size=4, device_mesh=mesh)) == [[2, 3], [6, 7]]


def test_shuffling_differs_by_epoch_and_seed_and_not_by_chance():
    def two_epochs(seed):
        loader = DataLoader(table(), batch_size=4, shuffle=True, seed=seed)
        return xs(loader), xs(loader)

    first, second = two_epochs(1)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(10))
    assert first != second
    random.seed(99)
    torch.manual_seed(99)
    assert two_epochs(1) == (first, second)
    assert two_epochs(2) != (first, second)


def test_seed_of_the_environment(monkeypatch):
    monkeypatch.setenv("TWINKLE_SEED", "1")
    by_environment = xs(DataLoader(table(), batch_size=4, shuffle=True))
    assert by_environment == xs(DataLoader(table(), batch_size=4, shuffle=True, seed=1))


@pytest.mark.parametrize("stop", range(9))
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"drop_last": True, "shuffle": True}, {"min_batch_size": 3}]
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(stop, options):
    """Three epochs in one run, and in two runs: the second starts from the state that the first left."""

    def run(loader, epochs=3):
        for _ in range(epochs):
            yield from loader

    def make():
        return DataLoader(table(), batch_size=4, seed=3, **options)

    undisturbed = xs(run(make()))
    killed = make()
    before = xs(islice(run(killed), stop))
    resumed = make()
    resumed.resume_from_checkpoint(killed.get_state()["consumed_train_samples"])
    epochs_left = 3 - stop // len(killed)
    assert before + xs(run(resumed, epochs_left)) == undisturbed
    assert resumed.get_state() == {"consumed_train_samples": len(flat(undisturbed))}


@pytest.mark.parametrize("stop", range(7))
def test_streams_resume_too(stop):
    def run(loader, epochs):
        for _ in range(epochs):
            yield from loader

    undisturbed = xs(run(DataLoader(stream(), batch_size=4), 3))
    killed = DataLoader(stream(), batch_size=4)
    before = xs(islice(run(killed, 3), stop))
    resumed = DataLoader(stream(), batch_size=4)
    resumed.skip_consumed_samples(killed.get_state()["consumed_train_samples"])
    assert before + xs(run(resumed, 3 - stop // 3)) == undisturbed


def test_skipping_is_for_one_loop():
    loader = DataLoader(table(), batch_size=4)
    loader.skip_consumed_samples(6)
    assert xs(loader) == [[6, 7], [8, 9]]  # starts in the middle of a batch: the rest of it, then the usual batches
    assert xs(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert loader.get_state() == {"consumed_train_samples": 20}
    loader.skip_consumed_samples(0)
    assert xs(loader)[0] == [0, 1, 2, 3]
    with pytest.raises(InvalidInputError, match="consumed_train_samples"):
        loader.skip_consumed_samples(-1)


def test_resuming_from_all_that_a_model_tells():
    loader = DataLoader(table(), batch_size=4)
    loader.resume_from_checkpoint(**{"cur_step": 3, "consumed_train_samples": 8, "gradient_accumulation_steps": 2})
    assert xs(loader) == [[8, 9]]


def test_a_checkpoint_without_a_position():
    loader = DataLoader(table(), batch_size=4)
    for resume in (loader.skip_consumed_samples, loader.resume_from_checkpoint):
        with pytest.warns(UserWarning, match="does not support consumed-data skipping"):
            resume(None)
    assert xs(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_loop_that_is_left_early_is_an_epoch_all_the_same():
    loader = DataLoader(table(), batch_size=4, shuffle=True, seed=1)
    first, second = xs(loader), xs(loader)
    loader = DataLoader(table(), batch_size=4, shuffle=True, seed=1)
    for batch in loader:
        assert xs([batch]) == first[:1]
        break
    assert loader.get_state() == {"consumed_train_samples": 4}
    assert xs(islice(loader, 2)) == second[:2]
    resumed = DataLoader(table(), batch_size=4, shuffle=True, seed=1)
    resumed.resume_from_checkpoint(loader.get_state()["consumed_train_samples"])
    assert xs(resumed) == second[2:]


def test_next_without_iter():
    loader = DataLoader(table(5), batch_size=4)
    assert [row["x"] for row in next(loader)] == [0, 1, 2, 3]
    assert [row["x"] for row in next(loader)] == [4]
    with pytest.raises(StopIteration):
        next(loader)
    assert [row["x"] for row in next(loader)] == [0, 1, 2, 3]


class Located(list):
    """Rows that tell which process read them."""

    def __getitem__(self, index):
        return {"x": index, "process": os.getpid(), "random": random.random()}


@pytest.mark.parametrize("persistent", [False, True])
def test_workers(persistent):
    def epochs():
        rows = Located(range(10))
        loader = DataLoader(rows, batch_size=4, shuffle=True, seed=1, num_workers=2, persistent_workers=persistent)
        return [list(loader), list(loader)]

    found = epochs()
    rows = [row for epoch in found for batch in epoch for row in batch]
    assert os.getpid() not in {row["process"] for row in rows}
    alone = DataLoader(table(), batch_size=4, shuffle=True, seed=1)
    assert [xs(epoch) for epoch in found] == [xs(alone), xs(alone)]
    drawn = [row["random"] for row in rows]
    assert drawn == [row["random"] for epoch in epochs() for batch in epoch for row in batch]


def test_workers_resume():
    loader = DataLoader(table(), batch_size=4, shuffle=True, seed=1, num_workers=2)
    whole = xs(loader)
    resumed = DataLoader(table(), batch_size=4, shuffle=True, seed=1, num_workers=2)
    resumed.resume_from_checkpoint(4)
    assert xs(resumed) == whole[1:]


def test_workers_of_a_stream_read_each_row_once():
    batches = xs(DataLoader(stream(), batch_size=3, num_workers=2))
    assert sorted(flat(batches)) == list(range(10))


class Flaky:
    """A dataset whose row 3 cannot be read the first ``failures`` times."""

    def __init__(self, failures, error=OSError):
        self.failures = failures
        self.error = error
        self.reads = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.reads.append(index)
        if index == 3 and self.reads.count(3) <= self.failures:
            raise self.error("connection lost")
        return {"x": index}


def test_a_row_that_fails_to_read_is_asked_for_again():
    rows = Flaky(failures=2)
    assert xs(DataLoader(rows, batch_size=6)) == [[0, 1, 2, 3, 4, 5]]
    assert rows.reads == [0, 1, 2, 3, 3, 3, 4, 5]
    with pytest.raises(DataError, match="Max retries exceeded: row 3 cannot be read: connection lost"):
        list(DataLoader(Flaky(failures=99), batch_size=6, max_retries=2))
    wrong = Flaky(failures=1, error=KeyError)  # not retried: a KeyError would come again
    with pytest.raises(KeyError):
        list(DataLoader(wrong, batch_size=6))


def test_empty_rows_are_replaced_the_same_way_after_a_restart():
    def make():
        dataset = LazyDataset(DatasetMeta(data=[{"x": n} for n in range(12)]))
        dataset.map(lambda columns: columns if columns["x"][0] % 3 else {"x": []})
        return DataLoader(dataset, batch_size=4, shuffle=True, seed=5)

    whole = xs(make())
    assert [len(batch) for batch in whole] == [4, 4, 4]
    assert all(x % 3 for batch in whole for x in batch)
    resumed = make()
    resumed.resume_from_checkpoint(8)
    assert xs(resumed) == whole[2:]


def test_nothing_but_empty_rows():
    dataset = LazyDataset(DatasetMeta(data=[{"x": 1}]))
    dataset.map(lambda columns: {"x": []})
    with pytest.raises(DataError, match="Max retries exceeded: row 0 and 3 substitutes for it are empty"):
        list(DataLoader(dataset, batch_size=1, max_retries=3))


def test_processor():
    rows = [{"input_ids": [1] * n, "labels": [2] * n} for n in (2, 3)]
    for processor, options in (("InputProcessor", {"padding_side": "left"}), (InputProcessor(padding_side="left"), {})):
        loader = DataLoader(rows, batch_size=2)
        loader.set_processor(processor, **options)
        (batch,) = loader
        assert batch["input_ids"].tolist() == [[0, 1, 1], [1, 1, 1]]
    loader.set_processor(len)
    assert list(loader) == [2]
    assert list(DataLoader(rows, batch_size=2, collate_fn=len)) == [2]
    with pytest.raises(UnknownNameError, match="unknown InputProcessor 'Output'; known: InputProcessor"):
        loader.set_processor("Output")


def test_arguments_are_checked():
    for batch_size in (0, 3):
        with pytest.raises(InvalidInputError, match=r"batch_size: got ., allowed: a multiple of 2"):
            DataLoader(table(), batch_size=batch_size, device_mesh=Mesh(2, 0))
    with pytest.raises(InvalidInputError, match="min_batch_size"):
        DataLoader(table(), batch_size=2, min_batch_size=3)
    with pytest.raises(InvalidInputError, match="shuffle"):
        DataLoader(stream(), batch_size=2, shuffle=True)
    with pytest.raises(TypeError, match="samplers"):
        DataLoader(table(), batch_size=2, samplers=[1])


class Turning:
    """A sampler that begins each epoch with another row."""

    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter([(n + self.epoch) % self.count for n in range(self.count)])


class InTwos(Turning):
    """A batch sampler: the rows of Turning, two in a batch."""

    def __iter__(self):
        rows = list(super().__iter__())
        return iter([rows[start : start + 2] for start in range(0, self.count, 2)])


@pytest.mark.parametrize(
    "options", [{"batch_size": 2, "sampler": Turning(5)}, {"batch_size": 8, "batch_sampler": InTwos(5)}]
)
def test_samplers_of_the_user(options):
    loader = DataLoader(table(), **options)
    assert xs(loader) == [[0, 1], [2, 3], [4]]
    assert xs(loader) == [[1, 2], [3, 4], [0]]
    assert len(loader) == 3
    loader.skip_consumed_samples(5 + 3)
    assert xs(loader) == [[4], [0]]
    assert xs(DataLoader(table(), device_mesh=Mesh(2, 1), **options)) == [[1], [3]]
    shuffled = DataLoader(table(), batch_size=4, sampler=torch.utils.data.RandomSampler(range(10)))
    assert sorted(flat(xs(shuffled))) == list(range(10))


def with_a_generator(kind):
    """torch's random samplers have another order each time they are read, and no set_epoch."""
    sampler = torch.utils.data.RandomSampler(range(10), generator=torch.Generator().manual_seed(7))
    return (
        {"sampler": sampler}
        if kind == "sampler"
        else {kind: torch.utils.data.BatchSampler(sampler, 3, drop_last=False)}
    )


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_random_sampler_of_torch_resumes_in_its_epoch(kind):
    loader = DataLoader(table(), batch_size=3, **with_a_generator(kind))
    epochs = []
    for _ in range(3):
        epochs.append(xs(loader))
        assert len(loader) == 4
    assert epochs[0] != epochs[1] != epochs[2]
    for consumed, rest in ((10, epochs[1:]), (16, [epochs[1][2:], epochs[2]]), (23, [epochs[2][1:]])):
        resumed = DataLoader(table(), batch_size=3, **with_a_generator(kind))
        resumed.skip_consumed_samples(consumed)
        assert [xs(resumed) for _ in rest] == rest


def test_samplers_that_do_not_fit():
    with pytest.raises(InvalidInputError, match=r"batch_sampler: .* nothing beside sampler"):
        DataLoader(table(), batch_size=2, sampler=[1], batch_sampler=[[1]])
    with pytest.raises(InvalidInputError, match=r"sampler: .* nothing beside shuffle"):
        DataLoader(table(), batch_size=2, sampler=[1], shuffle=True)
    with pytest.raises(InvalidInputError, match=r"sampler: .* a length"):
        DataLoader(table(), batch_size=2, sampler=iter([1]))
    with pytest.raises(InvalidInputError, match=r"sampler: .* a stream is read in its order"):
        DataLoader(stream(), batch_size=2, sampler=[1])

    class Short(Turning):
        def __iter__(self):
            return iter([0])

    with pytest.raises(DataError, match="gave 1 row numbers, and its length is 3"):
        list(DataLoader(table(), batch_size=2, sampler=Short(3)))


def test_a_generator_gives_the_seed():
    def order(**options):
        return xs(DataLoader(table(), batch_size=10, shuffle=True, **options))

    assert order(generator=torch.Generator().manual_seed(5)) == order(seed=5) != order(seed=6)
    with pytest.raises(InvalidInputError, match="None beside a generator"):
        order(generator=torch.Generator(), seed=5)
    with pytest.raises(InvalidInputError, match="generator: got 5, allowed: a torch"):
        order(generator=5)


class Noted:
    """A row for each number that Python's generator draws in a worker, which ``note`` has prepared."""

    noted = None

    def __len__(self):
        return 2

    def __getitem__(self, idx):
        return {"x": (Noted.noted, random.random())}


def note(worker):
    Noted.noted = (worker, random.getstate()[1][0])


def test_the_users_worker_init_fn_runs_after_seeding():
    first, second = (
        xs(DataLoader(Noted(), batch_size=1, num_workers=1, seed=3, worker_init_fn=note, in_order=True))
        for _ in range(2)
    )
    assert first == second  # both saw the seeded generator
    assert first[0][0][0][0] == 0


def test_import_is_light():
    """Datasets, loaders and processors import their libraries when they are used, not when they are imported."""
    code = "import sys, twinkle.dataset, twinkle.dataloader, twinkle.processor; print(*sorted(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert {"datasets", "torch", "transformers"}.isdisjoint(done.stdout.split())


def test_retry_sampler():
    rows = [{"x": n} if n != 2 else None for n in range(6)]
    indices = list(RetrySampler(range(4), rows, seed=1))
    assert indices[:2] == [0, 1]
    assert indices[3] == 3
    assert len(indices) == 6  # refilled from where the sampler ended
    assert 2 not in indices
    assert list(RetrySampler(range(4), rows, seed=1, skip_samples=3)) == indices[3:]
    assert len(RetrySampler(range(4), rows)) == 6
    with pytest.raises(DataError, match="Max retries exceeded"):
        list(RetrySampler(range(2), [None, None], max_retries=2))
    with pytest.raises(InvalidInputError, match="skip_samples"):
        RetrySampler(range(2), rows, skip_samples=7)


def test_device_mesh_sampler():
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert list(DeviceMeshSampler(batches)) == batches
    assert list(DeviceMeshSampler(batches, Mesh(2, 1))) == [[2, 3], [6, 7]]
    assert list(DeviceMeshSampler(batches, min_batch_size=2, skip_samples=5)) == [[5, 6, 7]]


# --- streams, one batch per call --------------------------------------------------------------------------------------


def fetcher(rows, batch_size=4, mesh=None, **options):
    return DeviceMeshIterableFetcher(rows, True, list, False, batch_size, mesh, **options)


def test_fetched_batches_are_cut_to_a_process():
    fetching = [fetcher(range(1, 11), mesh=Mesh(2, rank)) for rank in range(2)]
    assert [[each.fetch() for each in fetching] for _ in range(3)] == [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9], [10]]]
    with pytest.raises(StopIteration):
        fetching[0].fetch()


def test_fetching_leaves_out_empty_rows_and_too_short_batches():
    fetching = fetcher([1, None, 2, {}, 3, 4, 5], min_batch_size=2)
    assert fetching.fetch() == [1, 2, 3, 4]
    with pytest.raises(StopIteration):
        fetching.fetch()
    with pytest.raises(DataError, match="No valid data after 3"):
        fetcher([None] * 9, max_retries=2).fetch()
