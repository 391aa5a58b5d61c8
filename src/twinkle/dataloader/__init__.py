"""Data loaders. torch is imported when the first batch is made."""

from twinkle.dataloader.batches import DeviceMeshSampler
from twinkle.dataloader.dataloader import DataLoader
from twinkle.dataloader.draw import RetrySampler
from twinkle.dataloader.iterable_fetcher import DeviceMeshIterableFetcher
from twinkle.dataloader.mesh import DataMesh

__all__ = ["DataLoader", "DataMesh", "DeviceMeshIterableFetcher", "DeviceMeshSampler", "RetrySampler"]
