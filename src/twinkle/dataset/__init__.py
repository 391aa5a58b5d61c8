"""Datasets: rows from hubs, files or memory. Built on the ``datasets`` library, which is imported on first use."""

from twinkle.dataset.dataset import Dataset
from twinkle.dataset.iterable_dataset import IterableDataset
from twinkle.dataset.iterable_packing_dataset import IterablePackingDataset
from twinkle.dataset.lazy_dataset import LazyDataset
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.packing_dataset import PackingDataset

__all__ = ["Dataset", "DatasetMeta", "IterableDataset", "IterablePackingDataset", "LazyDataset", "PackingDataset"]
