"""Data loaders. Importing this package does not import torch."""

from twinkle.dataloader.batches import DeviceMeshSampler
from twinkle.dataloader.dataloader import DataLoader
from twinkle.dataloader.draw import RetrySampler
from twinkle.dataloader.iterable_fetcher import DeviceMeshIterableFetcher
from twinkle.dataloader.mesh import DataMesh

__all__ = ["DataLoader", "DataMesh", "DeviceMeshIterableFetcher", "DeviceMeshSampler", "RetrySampler"]
