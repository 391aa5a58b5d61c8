"""Which datasets are streams."""

import sys

from twinkle.dataset import IterableDataset, IterablePackingDataset

__all__ = ["is_stream"]


def is_stream(dataset: object) -> bool:
    """Ours, those of the ``datasets`` library, and torch's; everything else has rows by number."""
    if isinstance(dataset, IterableDataset | IterablePackingDataset):
        return True
    # Such an object cannot exist unless its library is loaded: asking must not load it.
    libraries = [sys.modules.get(name) for name in ("datasets", "torch.utils.data")]
    return any(isinstance(dataset, library.IterableDataset) for library in libraries if library is not None)
