"""A stream that is encoded and packed while it is read. A pack is one row made of several short encoded rows."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from twinkle.dataset.dataset import Dataset, Row, on_worker
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.options import LoadOptions, MapOptions
from twinkle.dataset.packing import DEFAULT_CAPACITY, join_rows, pack
from twinkle.errors import InvalidInputError, StreamError, UnsupportedError
from twinkle.infra import remote_class

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["IterablePackingDataset"]


@remote_class(execute="first")
class IterablePackingDataset(Dataset):
    """A stream of packs. Set a template, call :meth:`pack_dataset`, iterate; :meth:`encode` is refused.

    ``packing_interval`` rows are packed together, while ``packing_num_proc`` threads encode the next rows. Threads are
    enough, because the tokenizer releases the interpreter's lock. The emptiest pack is held back and packed again with
    the next rows. ``cyclic=True`` starts over at the end of the stream, endlessly.
    """

    can_stream: ClassVar[tuple[bool, ...]] = (True,)

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        packing_interval: int = 128,
        packing_num_proc: int = 1,
        cyclic: bool = False,
        **load_options: Unpack[LoadOptions],
    ) -> None:
        for name, value in (("packing_interval", packing_interval), ("packing_num_proc", packing_num_proc)):
            if value < 1:
                raise InvalidInputError(name, value, "an integer ≥ 1")
        self.packing_interval = packing_interval
        self.packing_num_proc = packing_num_proc
        self.cyclic = cyclic
        self._ready = False
        super().__init__(dataset_meta, **load_options)

    # The argument has another name here than in the other datasets, because clients use this name.
    def set_template(  # type: ignore[override]
        self, template_cls: "Template | type[Template] | str", **init_args: Any
    ) -> None:
        super().set_template(template_cls, **init_args)
        if self._require_template("set_template").truncation_strategy == "split":
            raise UnsupportedError("truncation_strategy: 'split' cannot be packed as it streams; use PackingDataset")

    def encode(self, add_generation_prompt: bool = False, **map_options: Unpack[MapOptions]) -> None:
        raise UnsupportedError("encode: IterablePackingDataset encodes while it is read; call pack_dataset() instead")

    @on_worker
    def pack_dataset(self) -> None:
        """Allow iteration. Rows are encoded and packed during the iteration, not here."""
        self._require_template("pack_dataset")
        self._sources.require_current()
        self._ready = True

    def __iter__(self) -> Iterator[Row]:
        if not self._ready:
            raise InvalidInputError("dataset", "not packed", "packed rows (Call `pack_dataset()` first)")
        return map(self._serve, self._packed())

    def __getitem__(self, idx: int) -> Row:
        raise StreamError("IterablePackingDataset: a stream has no rows by number; use PackingDataset")

    def __len__(self) -> int:
        raise StreamError("IterablePackingDataset: a stream has no length; use PackingDataset")

    def _packed(self) -> Iterator[Row]:
        capacity = self._require_template("pack_dataset").max_length or DEFAULT_CAPACITY
        waiting: list[Row] = []
        for encoded in self._encoded():
            waiting += encoded
            bins = pack([row["length"] for row in waiting], capacity)
            if not bins:
                continue
            held = min(bins, key=lambda places: sum(waiting[place]["length"] for place in places))
            for places in bins:
                if places is not held:
                    yield join_rows([waiting[place] for place in places])
            waiting = [waiting[place] for place in held]
        if waiting:
            yield join_rows(waiting)

    def _encoded(self) -> Iterator[list[Row]]:
        """Yield encoded intervals in order. The threads end with the generator, even if it is not read to its end."""
        template = self._require_template("pack_dataset")
        intervals = self._intervals()
        with ThreadPoolExecutor(self.packing_num_proc, thread_name_prefix="twinkle-encode") as pool:
            ahead: list[Future[list[Row]]] = []
            try:
                for interval in intervals:
                    ahead.append(pool.submit(template.batch_encode, interval))
                    if len(ahead) > self.packing_num_proc:
                        yield ahead.pop(0).result()
                for future in ahead:
                    yield future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _intervals(self) -> Iterator[list[Row]]:
        while True:
            rows = iter(self._sources.require_current())
            empty = True
            while interval := list(islice(rows, self.packing_interval)):
                empty = False
                yield interval
            if empty or not self.cyclic:
                return
