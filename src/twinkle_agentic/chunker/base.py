"""The interface of chunkers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle_agentic.data_format import Chunks

__all__ = ["Chunker"]


class Chunker(ABC):
    """Cuts a conversation into chunks."""

    @abstractmethod
    def __call__(self, trajectory: Mapping[str, Any]) -> Chunks:
        """Return the chunks of the trajectory's messages, in order. The trajectory is not changed."""
