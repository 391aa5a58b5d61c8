"""The data loader. A run that is resumed gets the same batches as a run without an interruption."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

from twinkle.dataloader.batches import BatchPlan, GivenBatches
from twinkle.dataloader.draw import EpochOrder, SamplerOrder, Table
from twinkle.dataloader.mesh import DataMesh, is_stream, own_mesh
from twinkle.errors import InvalidInputError, StreamError
from twinkle.hub.construction import construct
from twinkle.infra import current_seed, remote_class, remote_function

if TYPE_CHECKING:
    import torch.utils.data

    from twinkle.processor import InputProcessor

__all__ = ["DataLoader"]

Collate = Callable[[list[Any]], Any]

_at_once = remote_function(lazy_collect=False)


@remote_class(execute="first")
class DataLoader:
    """Iterates over a dataset in batches: lists of rows, or the results of a processor.

    ``batch_size`` counts the rows of all processes; with a ``device_mesh``, each process gets its slice of every batch.
    The driver of a Ray cluster gets whole batches, because the verbs of a model divide them among its workers.
    A batch with fewer than ``min_batch_size`` rows (by default one for each process) ends the epoch. A ``for`` loop
    over the loader is one epoch, or after :meth:`skip_consumed_samples` the rest of one; with ``shuffle=True``, each
    epoch has its own order, which depends on ``seed`` and the number of the epoch. ``generator`` is another way to give
    a seed: its initial one is used.

    ``sampler`` gives the numbers of an epoch's rows in order, ``batch_sampler`` the rows of each batch (then
    ``batch_size`` has no effect). Before an epoch their ``set_epoch`` is called, if they have one; otherwise a resumed
    run reads over the numbers of earlier epochs. In all processes they must yield the same numbers, and when a run is
    resumed the same as before: give a RandomSampler of torch a generator with a seed. ``worker_init_fn`` is called in
    each worker process after its random generators are seeded.

    The state is the number of rows consumed over all epochs. A loop that was left early and is started again continues
    with the next epoch; the rest of the previous epoch counts as consumed, except that of a stream.

    On a worker group the loader lives on the first worker, and so does a dataset that is given as a function. Batches
    are remote promises, which the workers of a model fetch from there.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        device_mesh: DataMesh | None = None,
        max_retries: int = 20,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        timeout: float = 0,
        multiprocessing_context: Any = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        generator: "torch.Generator | None" = None,
        worker_init_fn: Callable[[int], None] | None = None,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        self._mesh = own_mesh(device_mesh)
        processes = self._mesh.data_world_size
        if not isinstance(batch_size, int) or batch_size < 1 or batch_size % processes:
            raise InvalidInputError("batch_size", batch_size, f"a multiple of {processes}, the processes that share it")
        self.dataset = dataset() if callable(dataset) else dataset
        self._stream = is_stream(self.dataset)
        if not self._stream and not isinstance(self.dataset, Sized):
            raise InvalidInputError(
                "dataset", self.dataset, "rows by number and a length, or a stream (IterableDataset)"
            )
        if self._stream and shuffle:
            raise InvalidInputError("shuffle", True, "False: a stream is read in its order")
        self._sampler, self._batch_sampler = sampler, batch_sampler
        self._check_samplers(shuffle, drop_last)
        self.batch_size = batch_size
        self.min_batch_size = processes if min_batch_size is None else min_batch_size
        if not 1 <= self.min_batch_size <= batch_size:
            raise InvalidInputError("min_batch_size", min_batch_size, f"1 to {batch_size}, the batch_size")
        self.max_retries = max_retries
        self._shuffle = shuffle
        self._seed = _chosen_seed(seed, generator)
        self._drop_last = drop_last
        self._collate: Collate = _rows_as_they_are if collate_fn is None else collate_fn
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "multiprocessing_context": multiprocessing_context,
            "worker_init_fn": worker_init_fn,
            "in_order": in_order,
        }
        if pin_memory_device:  # torch warns whenever this is given
            self._options["pin_memory_device"] = pin_memory_device
        self._position = 0
        self._resumed = False
        self._batches: Iterator[Any] | None = None
        self._plan: BatchPlan | GivenBatches | None = None
        self._loader: torch.utils.data.DataLoader[Any] | None = None

    @_at_once
    def set_processor(
        self, processor_cls: "InputProcessor | type[InputProcessor] | str | Callable[..., Any]", **init_args: Any
    ) -> None:
        """Set the processor that turns rows into a batch.

        It is an instance, a class, a name in ``twinkle.processor``, a plugin or a function.
        """
        from twinkle.processor import InputProcessor

        self._collate = cast("Collate", construct(processor_cls, InputProcessor, "twinkle.processor", init_args))
        self._loader = None  # make a new one with this function

    @_at_once
    def get_state(self) -> dict[str, int]:
        """Return the state to save in a checkpoint."""
        return {"consumed_train_samples": self._position}

    @_at_once
    def skip_consumed_samples(self, consumed_train_samples: int | None) -> None:
        """Begin the next loop after this many rows. Later loops begin at the start of an epoch.

        A table jumps to that row; a stream is read up to it. None stands for a checkpoint without a position: nothing
        is skipped, and a warning is given.
        """
        if consumed_train_samples is None:
            warnings.warn(
                "consumed_train_samples is None: a checkpoint without a position does not support consumed-data "
                "skipping; no rows are skipped",
                stacklevel=2,
            )
            return
        if not isinstance(consumed_train_samples, int) or consumed_train_samples < 0:
            raise InvalidInputError("consumed_train_samples", consumed_train_samples, "an integer ≥ 0")
        self._position = consumed_train_samples
        self._resumed = True
        self._batches = None

    @_at_once
    def resume_from_checkpoint(
        self,
        consumed_train_samples: int | None,
        *,
        cur_step: int | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> None:
        """Call :meth:`skip_consumed_samples` with the progress that a model's ``resume_from_checkpoint`` returns.

        It can be passed on as ``**progress``; the last two arguments concern only the model and are ignored here.
        """
        self.skip_consumed_samples(consumed_train_samples)

    @_at_once
    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        if self._stream:
            raise StreamError("DataLoader: a stream has no length")
        return self._epochs().batches_per_epoch

    @remote_function()
    def __iter__(self) -> Iterator[Any]:
        self._batches = self._stream_epoch() if self._stream else self._table_epoch()
        return self

    @remote_function()
    def __next__(self) -> Any:
        if self._batches is None:
            iter(self)
        assert self._batches is not None
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise

    def _table_epoch(self) -> Iterator[Any]:
        plan = self._epochs()
        if not plan.rows_per_epoch:
            return
        if not self._resumed:  # skip the rest of an epoch that was left early
            self._position = -(-self._position // plan.rows_per_epoch) * plan.rows_per_epoch
        self._resumed = False
        plan.position = self._position
        for size, batch in zip(list(plan.sizes()), self._torch_loader(plan.position), strict=True):
            self._position += size
            yield batch

    def _stream_epoch(self) -> Iterator[Any]:
        skip, self._resumed = (self._position if self._resumed else 0), False
        served = 0
        while not served:
            before = skip
            for size, batch in self._torch_loader(self._position):
                if skip >= size:  # read over batches that an earlier run has consumed
                    skip -= size
                    continue
                # A batch is already collated and cannot be cut. If the position is inside a batch (after a change of
                # batch_size), the whole batch is served.
                self._position += size - skip
                skip = 0
                served += 1
                yield batch
            if skip == before:  # the stream is empty
                return
            # Nothing was served, so the earlier run had consumed this whole epoch: continue in the next one.

    def _epochs(self) -> BatchPlan | GivenBatches:
        if self._plan is None and self._batch_sampler is not None:
            self._plan = GivenBatches(self._batch_sampler, self._seed, self._mesh, self.min_batch_size)
        if self._plan is None:
            order: EpochOrder | SamplerOrder = EpochOrder(len(self.dataset), self._shuffle, self._seed)
            if self._sampler is not None:
                order = SamplerOrder(self._sampler, self._seed)
            self._plan = BatchPlan(order, len(order), self.batch_size, self._mesh, self.min_batch_size, self._drop_last)
        return self._plan

    def _check_samplers(self, shuffle: bool, drop_last: bool) -> None:
        given = {"sampler": self._sampler, "batch_sampler": self._batch_sampler}
        named = [name for name, value in given.items() if value is not None]
        others = [name for name, value in (("shuffle", shuffle), ("drop_last", drop_last)) if value]
        if self._batch_sampler is None:
            others = [name for name in others if name == "shuffle"]
        if self._stream and named:
            raise InvalidInputError(named[0], given[named[0]], "None: a stream is read in its order")
        if len(named) > 1 or (named and others):
            raise InvalidInputError(named[-1], given[named[-1]], f"nothing beside {(named[:-1] or others)[0]}")
        if self._sampler is not None and not isinstance(self._sampler, Sized):
            raise InvalidInputError("sampler", self._sampler, "row numbers, and a length: how many an epoch has")

    def _torch_loader(self, position: int) -> "torch.utils.data.DataLoader[Any]":
        """Return torch's loader, which runs the worker processes. All epochs share one, so that workers can persist."""
        from twinkle.dataloader.torch_loader import stream_loader, table_loader

        if self._loader is None:
            if self._stream:
                self._loader = stream_loader(
                    self.dataset,
                    self._collate,
                    self.batch_size,
                    self._mesh,
                    self.min_batch_size,
                    self._drop_last,
                    self._options,
                )
            else:
                table = cast("Table", self.dataset)
                self._loader = table_loader(table, self._collate, self._epochs(), self.max_retries, self._options)
        # Workers get their seeds from this generator. Seed it, so that they do not depend on earlier random numbers.
        assert self._loader.generator is not None
        self._loader.generator.manual_seed(hash((self._seed, position, self._mesh.data_rank)) % 2**63)
        return self._loader


def _chosen_seed(seed: int | None, generator: "torch.Generator | None") -> int:
    if generator is None:
        return current_seed() if seed is None else seed
    if not hasattr(generator, "initial_seed"):
        raise InvalidInputError("generator", generator, "a torch.Generator, or None")
    if seed is not None:
        raise InvalidInputError("seed", seed, "None beside a generator, whose initial seed is used")
    return generator.initial_seed()


def _rows_as_they_are(rows: list[Any]) -> list[Any]:
    return rows
