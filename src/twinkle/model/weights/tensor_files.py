"""Writes safetensors files: tensors one at a time, in any order, or many small ones at once.

``safetensors.torch.save_file`` needs all tensors of a file in memory, which for a model that is divided over processes
would be the memory of one of them. It also copies them once more, and no other Python thread runs while it copies and
writes, so a server would not answer meanwhile. The bytes are the same as those of ``save_file``: a header of JSON with
the place of each tensor, then the tensors, ordered by name. All tensors of a file have one dtype.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["write_arrays", "write_at_once", "write_tensors"]

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_ALIGNMENT = 8  # of the first tensor, in bytes
_MOST_BUFFERS = 512  # of one call of the operating system; Linux takes 1024

Shapes = Mapping[str, tuple[int, ...]]


def write_tensors(files: Mapping[Path, Shapes], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors with their names into files, each as it comes. ``files``: what each file holds."""
    with ExitStack() as opened:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for path, shapes in files.items():
            new = opened.enter_context(path.open("wb"))
            places |= {name: (new, offset) for name, offset in _begin(new, shapes, dtype).items()}
        for name, tensor in tensors:
            file, offset = places.pop(name)
            file.seek(offset)
            file.write(_bytes(tensor.to("cpu", dtype)))
        assert not places, "tensors are missing"


def write_arrays(path: Path, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """Write arrays with their names into a file, as :func:`write_at_once` does."""
    header, _ = _header({name: array.shape for name, array in arrays.items()}, torch.float32)
    _write(path, [memoryview(header), *(_flat(arrays[name]) for name in sorted(arrays))])


def write_at_once(path: Path, dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors with their names into a file, in very few steps. They must have this dtype.

    A thread that writes tensor by tensor lets other threads run at each of them, and then waits for its next turn. In a
    busy server, the many small tensors of an adapter would take several times as long as the writing itself.
    """
    assert all(tensor.dtype == dtype for tensor in tensors.values()), dtype
    header, _ = _header({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype)
    _write(path, [memoryview(header), *(_bytes(tensors[name]) for name in sorted(tensors))])


def _write(path: Path, buffers: Sequence[memoryview]) -> None:
    buffers = list(buffers)
    with path.open("wb", buffering=0) as file:
        while buffers:
            written = os.writev(file.fileno(), buffers[:_MOST_BUFFERS])
            done = 0
            while done < len(buffers) and written >= len(buffers[done]):
                written -= len(buffers[done])
                done += 1
            del buffers[:done]
            if written:
                buffers[0] = buffers[0][written:]


def _header(shapes: Shapes, dtype: torch.dtype) -> tuple[bytes, dict[str, int]]:
    """Return the header, and where in the file each tensor begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = dict[str, int](), 0
    for name in sorted(shapes):
        starts[name], end = end, end + math.prod(shapes[name]) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": shapes[name], "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _begin(file: BinaryIO, shapes: Shapes, dtype: torch.dtype) -> dict[str, int]:
    """Write the header, give the file its size, and return where in it each tensor begins."""
    header, starts = _header(shapes, dtype)
    file.write(header)
    file.truncate(len(header) + sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize)
    return starts


def _flat(array: NDArray[np.float32]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
