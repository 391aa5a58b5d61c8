"""Chunkers, which cut a conversation into chunks. They import ``data_format``."""

from twinkle_agentic.chunker.base import Chunker
from twinkle_agentic.chunker.native import NativeChunker

__all__ = ["Chunker", "NativeChunker"]
