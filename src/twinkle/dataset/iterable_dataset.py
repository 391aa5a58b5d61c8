"""A streamed dataset: rows are read one after another, while a program iterates over it."""

from typing import ClassVar

from twinkle.dataset.dataset import Dataset, Row
from twinkle.errors import StreamError
from twinkle.infra import remote_class

__all__ = ["IterableDataset"]


@remote_class(execute="first")
class IterableDataset(Dataset):
    """A stream of rows. map, filter and encode are applied while it is read. Each iteration reads it from the start."""

    can_stream: ClassVar[tuple[bool, ...]] = (True,)

    def __getitem__(self, idx: int) -> Row:
        raise StreamError("IterableDataset: a stream has no rows by number; iterate over it, or use Dataset")

    def __len__(self) -> int:
        raise StreamError("IterableDataset: a stream has no length; iterate over it, or use Dataset")
