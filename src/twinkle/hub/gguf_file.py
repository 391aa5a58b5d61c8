"""Read a GGUF file: its metadata fields and its tensors, still quantized."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gguf import GGUFReader, ReaderTensor

from twinkle.errors import UnsupportedError

__all__ = ["GgufFile", "read_gguf"]

T = TypeVar("T")


@dataclass(frozen=True)
class GgufFile:
    """The content of a GGUF file: metadata fields by their GGUF key, tensors by their GGUF name."""

    name: str
    fields: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    def require(self, key: str, kind: type[T]) -> T:
        """Return the value of a field; raise UnsupportedError if it is missing or not a ``kind``."""
        value = self.fields.get(key)
        if not isinstance(value, kind):
            raise UnsupportedError(f"{self.name} needs a field {key!r} of type {kind.__name__}, it has {value!r}")
        return value

    def get(self, key: str, default: T) -> T:
        """Return the value of an optional field, or ``default``; raise if it is present with another type."""
        return self.require(key, type(default)) if key in self.fields else default


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and read all its fields; tensors are memory-mapped and read when used."""
    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise UnsupportedError(f"{path.name} is not a GGUF file that can be read: {error}") from error
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return GgufFile(path.name, fields, {tensor.name: tensor for tensor in reader.tensors})
