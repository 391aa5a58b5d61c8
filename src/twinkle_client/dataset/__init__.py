"""Datasets on the server, and the metas that describe their rows."""

from twinkle_client.dataset.dataset import (
    Dataset,
    IterableDataset,
    IterablePackingDataset,
    LazyDataset,
    PackingDataset,
)
from twinkle_client.dataset.meta import DatasetMeta

__all__ = ["Dataset", "DatasetMeta", "IterableDataset", "IterablePackingDataset", "LazyDataset", "PackingDataset"]
