"""A GGUF file, read: its metadata fields and its tensors, still quantized."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gguf import GGUFReader, ReaderTensor

from twinkle.errors import UnsupportedError

__all__ = ["GgufFile", "read_gguf"]

T = TypeVar("T")


@dataclass(frozen=True)
class GgufFile:
    """What llama.cpp knows about a model: fields by their GGUF key, tensors by their GGUF name."""

    name: str
    fields: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    def require(self, key: str, kind: type[T]) -> T:
        """The value of a field that the conversion cannot do without."""
        value = self.fields.get(key)
        if not isinstance(value, kind):
            raise UnsupportedError(f"{self.name} needs a field {key!r} of type {kind.__name__}, it has {value!r}")
        return value

    def get(self, key: str, default: T) -> T:
        """The value of a field that may be left out."""
        return self.require(key, type(default)) if key in self.fields else default


def read_gguf(path: Path) -> GgufFile:
    """Read all fields; tensors are mapped from disk and read when used."""
    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise UnsupportedError(f"{path.name} is not a GGUF file that can be read: {error}") from error
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return GgufFile(path.name, fields, {tensor.name: tensor for tensor in reader.tensors})
