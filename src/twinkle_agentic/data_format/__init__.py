"""The pieces of a conversation that chunkers make and condensers shorten. Imports only ``twinkle``'s data formats."""

from twinkle_agentic.data_format.chunk import Chunk, Chunks, RawChunk, chunks_of_messages

__all__ = ["Chunk", "Chunks", "RawChunk", "chunks_of_messages"]
