"""The loaded datasets and, once they are mixed, their mixture."""

from collections.abc import Callable
from typing import cast

from twinkle.dataset.loading import Rows
from twinkle.dataset.meta import DatasetMeta
from twinkle.errors import InvalidInputError, UnknownNameError

__all__ = ["Sources"]


class Sources:
    """Loaded datasets by id, in the order in which they were added.

    Before mixing, :meth:`change` applies to one dataset; afterwards it applies to the mixture, which is then served.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Rows] = {}
        self.mixture: Rows | None = None

    @property
    def current(self) -> "Rows | None":
        """Return the mixture or, before mixing, the first dataset; None if nothing was loaded."""
        return self.mixture if self.mixture is not None else next(iter(self.by_id.values()), None)

    def require_current(self) -> Rows:
        if self.current is None:
            raise InvalidInputError("dataset", None, "at least one dataset: add_dataset(DatasetMeta(…)) first")
        return self.current

    def add(self, meta: DatasetMeta, rows: Rows) -> None:
        if self.mixture is not None:
            raise InvalidInputError("dataset_meta", meta.get_id(), "datasets added before mix_dataset()")
        if meta.get_id() in self.by_id:
            raise InvalidInputError("dataset_meta", meta.get_id(), "a dataset that is not loaded yet")
        self.by_id[meta.get_id()] = rows

    def id_of(self, meta: DatasetMeta | None) -> str:
        """Return the id of the dataset that ``meta`` describes; without a meta, that of the only dataset."""
        self.require_current()
        if meta is None:
            if len(self.by_id) > 1:
                raise InvalidInputError("dataset_meta", None, f"one of the loaded datasets: {', '.join(self.by_id)}")
            return next(iter(self.by_id))
        if meta.get_id() not in self.by_id:
            raise UnknownNameError("dataset", meta.get_id(), self.by_id)
        return meta.get_id()

    def change(self, meta: DatasetMeta | None, function: Callable[[Rows], Rows]) -> None:
        """Apply ``function`` to the mixture or, before mixing, to the dataset that ``meta`` describes."""
        if self.mixture is not None:
            if meta is not None:
                raise InvalidInputError("dataset_meta", meta.get_id(), "None: the datasets are mixed already")
            self.mixture = function(self.mixture)
        else:
            name = self.id_of(meta)
            self.by_id[name] = function(self.by_id[name])

    def change_all(self, function: Callable[[Rows], Rows]) -> None:
        """Apply ``function`` to every dataset, and to the mixture if there is one."""
        if self.mixture is not None:
            self.mixture = function(self.mixture)
        self.by_id = {name: function(rows) for name, rows in self.by_id.items()}

    def mix(self, interleave: bool) -> None:
        """Mix the datasets: interleaved until the shortest is used up, or one after another.

        A single dataset stays as it is.
        """
        if len(self.by_id) < 2:
            return
        from datasets import concatenate_datasets, interleave_datasets

        first, *others = self.by_id.values()
        parts = [first, *(_like(first, rows) for rows in others)]
        mixed = interleave_datasets(parts) if interleave else concatenate_datasets(parts)
        self.mixture = cast("Rows", mixed)


def _like(first: Rows, rows: Rows) -> Rows:
    """Return ``rows`` with the column types of ``first``, if both have the same columns."""
    if first.features is None or rows.features is None or first.features == rows.features:
        return rows
    return rows.cast(first.features) if set(first.features) == set(rows.features) else rows
