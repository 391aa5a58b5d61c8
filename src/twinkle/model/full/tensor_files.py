"""Writes safetensors files one tensor at a time, in any order.

``safetensors.torch.save_file`` needs all tensors of a file in memory, which for a model that is divided over processes
would be the memory of one of them. The bytes are the same as those of ``save_file``: a header of JSON with the place of
each tensor, then the tensors, ordered by name. All tensors of a file have one dtype.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

__all__ = ["write_tensors"]

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_ALIGNMENT = 8  # of the first tensor, in bytes

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


def _begin(file: BinaryIO, shapes: Shapes, dtype: torch.dtype) -> dict[str, int]:
    """Write the header, and return where in the file each tensor begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = dict[str, int](), 0
    for name in sorted(shapes):
        starts[name], end = end, end + math.prod(shapes[name]) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shapes[name], "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    length = struct.pack("<Q", len(text))
    file.write(length + text)
    first = len(length) + len(text)
    file.truncate(first + end)
    return {name: first + start for name, start in starts.items()}


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
