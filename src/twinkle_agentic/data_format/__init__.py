"""Chunks, the pieces of a conversation, and trace files, which show one to people. Imports only the library."""

from twinkle_agentic.data_format.chunk import Chunk, Chunks, RawChunk, chunks_of_messages, condensed_blocks

__all__ = ["Chunk", "Chunks", "RawChunk", "chunks_of_messages", "condensed_blocks"]
