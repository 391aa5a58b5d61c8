"""Batches of a dataset on the server. The rows stay there; the client passes references to batches around."""

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, overload

from twinkle_client.client.log_lines import left_to_server
from twinkle_client.client.session import TwinkleClient
from twinkle_client.compatibility import PATHS, missing
from twinkle_client.dataset import Dataset
from twinkle_client.environment import read_environment
from twinkle_client.errors import InvalidRequestError, invalid
from twinkle_client.protocol.base import TYPE_KEY
from twinkle_client.remote import RemoteObject, component, next_of

__all__ = ["DataLoader", "RemoteBatch"]

Row = dict[str, Any]

_DEFAULTS: Mapping[str, Any] = {
    "min_batch_size": None,
    "max_retries": 20,
    "shuffle": False,
    "seed": None,
    "drop_last": False,
}


class RemoteBatch(Sequence[Row]):
    """A batch of rows on the server. As ``inputs`` of a model it is sent as a reference.

    The first access to a row downloads all rows of the batch. The server keeps only the last few batches of a
    dataloader: use a batch before many others are drawn.
    """

    def __init__(self, loader: "DataLoader", number: int, length: int) -> None:
        self._loader = loader
        self._length = length
        self.number = number
        self._rows: list[Row] | None = None
        self._lock = threading.Lock()

    @property
    def rows(self) -> list[Row]:
        with self._lock:
            if self._rows is None:
                self._rows = self._loader.call("get_batch", number=self.number)
            return self._rows

    def to_wire(self) -> dict[str, Any]:
        return {TYPE_KEY: "Batch", "processor_id": self._loader.processor_id, "number": self.number}

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"RemoteBatch(number {self.number}, {self._length} rows)"


class DataLoader(RemoteObject):
    """A dataloader on the server, which iterates over a dataset in batches; every ``for`` loop over it is an epoch.

    The options are those of the library's class; ``shuffle`` without a seed uses TWINKLE_SEED, else the client's seed.
    The options from ``device_mesh`` to ``remote_group`` are accepted but not used, because the server decides how rows
    are loaded; a log line says so. ``collate_fn``, ``sampler``, ``batch_sampler`` and ``worker_init_fn`` must be None,
    because code is never sent to the server: see :meth:`set_processor`. The initial seed of a ``generator`` is a seed.
    """

    processor_type: ClassVar[str] = "dataloader"

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        max_retries: int = 20,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        collate_fn: None = None,
        sampler: None = None,
        batch_sampler: None = None,
        worker_init_fn: None = None,
        generator: Any = None,
        device_mesh: object = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        pin_memory: bool | None = None,
        timeout: float | None = None,
        multiprocessing_context: object = None,
        pin_memory_device: str | None = None,
        in_order: bool | None = None,
        remote_group: str | None = None,
        client: TwinkleClient | None = None,
    ) -> None:
        left_to_server(
            "DataLoader",
            device_mesh=device_mesh,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
            remote_group=remote_group,
        )
        if collate_fn is not None:
            raise invalid("collate_fn", collate_fn, "None: code is never shipped to the server; see set_processor")
        for name, code in (("sampler", sampler), ("batch_sampler", batch_sampler), ("worker_init_fn", worker_init_fn)):
            if code is not None:
                raise invalid(name, code, "None: code is never shipped to the server; shuffle and seed order the rows")
        if not isinstance(dataset, Dataset):
            raise invalid("dataset", dataset, "a dataset of twinkle_client.dataset")
        if generator is not None:
            seed = _seed_of(generator, seed)
        client = dataset.client if client is None else client
        if client is not dataset.client:
            raise InvalidRequestError("client: the dataset belongs to the session of another client")
        given = {
            "min_batch_size": min_batch_size,
            "max_retries": max_retries,
            "shuffle": shuffle,
            "seed": _default_seed(client) if seed is None and shuffle else seed,
            "drop_last": drop_last,
        }
        said = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
        super().__init__(client=client, dataset=dataset, batch_size=batch_size, **said)
        self.dataset = dataset
        self.batch_size = batch_size
        _ = self.processor_id
        dataset.has_loader = True

    def set_processor(self, processor_cls: object, **init_args: Any) -> None:
        """Choose what makes a batch of rows: a name, or an InputProcessor of :mod:`twinkle_client.processor`."""
        name, options = component("processor_cls", processor_cls, init_args)
        self.call("set_processor", processor_cls=name, **options)

    def get_state(self) -> dict[str, int]:
        """Return the position in the data, to be stored with a checkpoint."""
        state: dict[str, int] = self.call("get_state")
        return state

    def skip_consumed_samples(self, consumed_train_samples: int | None) -> None:
        """Start the next loop after this many rows. None skips nothing and warns."""
        if consumed_train_samples is None:
            _warn_of_no_position()
            return
        self.call("skip_consumed_samples", consumed_train_samples=consumed_train_samples)

    def resume_from_checkpoint(
        self,
        consumed_train_samples: int | None,
        *,
        cur_step: int | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> None:
        """Do what :meth:`skip_consumed_samples` does, with the result of the model's ``resume_from_checkpoint``.

        The result can be passed as ``**progress``; ``cur_step`` and ``gradient_accumulation_steps`` are ignored here.
        """
        if consumed_train_samples is None:
            _warn_of_no_position()
            return
        self.call("resume_from_checkpoint", consumed_train_samples=consumed_train_samples)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return int(self.call("__len__"))

    def __iter__(self) -> "DataLoader":
        self.call("__iter__")
        return self

    def __next__(self) -> Any:
        """Return a :class:`RemoteBatch`, or what a processor made of the rows."""
        batch = next_of(self, by_reference=True)
        if isinstance(batch, dict) and batch.get(TYPE_KEY) == "Batch":
            return RemoteBatch(self, batch["number"], batch["length"])
        return batch


def _seed_of(generator: Any, seed: int | None) -> int:
    if not hasattr(generator, "initial_seed"):
        raise invalid("generator", generator, "a torch.Generator, or None")
    if seed is not None:
        raise invalid("seed", seed, "None beside a generator, whose initial seed is used")
    return int(generator.initial_seed())


def _default_seed(client: TwinkleClient) -> int | None:
    """Return the seed of a loader that is given none: TWINKLE_SEED, else that of ``initialize``, as in the library."""
    seed = read_environment().seed
    return client.seed if seed is None else seed


def _warn_of_no_position() -> None:
    warnings.warn(
        "consumed_train_samples is None: a checkpoint without a position does not support consumed-data skipping; "
        "the next loop starts at the same row as without this call",
        stacklevel=3,
    )


def __getattr__(name: str) -> object:
    raise missing(PATHS, __name__, name)
