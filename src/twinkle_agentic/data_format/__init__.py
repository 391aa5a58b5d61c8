"""Chunks, the pieces of a conversation; thoughts in texts; trace files for people to read. Imports only the library."""

from twinkle_agentic.data_format.chunk import Chunk, Chunks, RawChunk, chunks_of_messages, condensed_blocks

__all__ = ["Chunk", "Chunks", "RawChunk", "chunks_of_messages", "condensed_blocks"]
