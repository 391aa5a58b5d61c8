"""Tensors on the wire: dense or CSR (compressed sparse rows), little-endian. Declared sizes are checked before use."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError
from twinkle.model.csr import Csr
from twinkle.server.wire import tinker_pb2 as pb

Array = NDArray[Any]

_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_INDEX = np.dtype("<i8")
MOST_CELLS = 2**24  # rows × columns of one sparse tensor
_MAX_DIMENSION = 2**31 - 1


def decode_tensor(tensor: pb.Tensor, field: str) -> Array | Csr:
    """Return a float32, int64 or int32 array, (N,) or (N, K); bfloat16 becomes float32. ``field`` names it in errors.

    A dense tensor is a read-only view of the message's bytes, or a copy if it was bfloat16. A sparse tensor becomes a
    :class:`Csr`, because a few bytes can describe a huge matrix. InvalidInputError if sizes and bytes do not fit.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidInputError(f"{field}.dtype", tensor.dtype, "1 float32, 2 int64, 3 int32, 4 bfloat16")
    encoding = tensor.WhichOneof("encoding")
    if encoding == "dense":
        flat = read_array(tensor.dense, dtype, field)
        array = flat.reshape(_shape(tensor, field, len(flat)))
    elif encoding == "sparse_csr":
        sparse = _from_csr(tensor, dtype, field)
        return replace(sparse, values=_widened(sparse.values)) if tensor.dtype == pb.DTYPE_BFLOAT16 else sparse
    else:
        raise InvalidInputError(field, "a tensor without data", "dense or sparse_csr")
    return _widened(array) if tensor.dtype == pb.DTYPE_BFLOAT16 else array


def read_array(data: bytes, dtype: np.dtype[Any], field: str) -> Array:
    """Return the numbers in ``data`` without a copy; InvalidInputError, with ``field``, if the last one is cut off."""
    if len(data) % dtype.itemsize != 0:
        raise InvalidInputError(field, f"{len(data)} bytes", f"a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _shape(tensor: pb.Tensor, field: str, size: int) -> tuple[int, ...]:
    """Return the declared shape, which must have ``size`` cells; without a declaration the tensor has one dimension."""
    if len(tensor.shape) == 0:
        return (size,)
    shape = _dimensions(tensor, field)
    if math.prod(shape) != size:
        raise InvalidInputError(field, f"{size} values for shape {shape}", f"{math.prod(shape)} values")
    return shape


def _dimensions(tensor: pb.Tensor, field: str) -> tuple[int, ...]:
    if len(tensor.shape) > 2:
        raise InvalidInputError(f"{field}.shape", f"{len(tensor.shape)} dimensions", "1 or 2 dimensions")
    shape = tuple(tensor.shape)
    if any(not 0 <= size <= _MAX_DIMENSION for size in shape):
        raise InvalidInputError(f"{field}.shape", shape, f"sizes in [0, {_MAX_DIMENSION}]")
    return shape


def _from_csr(tensor: pb.Tensor, dtype: np.dtype[Any], field: str) -> Csr:
    shape = _dimensions(tensor, field)
    if len(shape) != 2:
        raise InvalidInputError(f"{field}.shape", shape, "2 dimensions for a sparse tensor")
    if math.prod(shape) > MOST_CELLS:
        raise InvalidInputError(f"{field}.shape", shape, f"sparse tensors of at most {MOST_CELLS} cells")
    csr = tensor.sparse_csr
    values = read_array(csr.values, dtype, f"{field}.values")
    crow = read_array(csr.crow_indices, _INDEX, f"{field}.crow_indices")
    col = read_array(csr.col_indices, _INDEX, f"{field}.col_indices")
    return checked_csr(shape[0], shape[1], crow, col, values, field)


def checked_csr(rows: int, columns: int, crow: Array, col: Array, values: Array, field: str) -> Csr:
    """Return a sparse matrix; InvalidInputError if its indices are inconsistent. ``field`` names it in errors."""
    count = len(values)
    if len(crow) != rows + 1:
        raise InvalidInputError(f"{field}.crow_indices", f"{len(crow)} entries", f"{rows + 1}: one a row and one more")
    if len(col) != count:
        raise InvalidInputError(f"{field}.col_indices", f"{len(col)} entries", f"{count}: one a value")
    if crow[0] != 0 or crow[-1] != count or (crow[1:] < crow[:-1]).any():
        raise InvalidInputError(
            f"{field}.crow_indices", f"from {crow[0]} to {crow[-1]}", f"numbers from 0 to {count} that never decrease"
        )
    if count and not (col.min() >= 0 and col.max() < columns):
        raise InvalidInputError(f"{field}.col_indices", f"{col.min()} to {col.max()}", f"columns in [0, {columns})")
    cells = np.repeat(np.arange(rows, dtype=np.int64) * columns, crow[1:] - crow[:-1]) + col
    if (cells[1:] <= cells[:-1]).any():
        raise InvalidInputError(f"{field}.col_indices", "a column out of order or twice", "increasing within a row")
    return Csr((rows, columns), crow, col, values)


def widest_row(matrix: Csr) -> int:
    """Return the number of cells in the row that lists the most, at least 1."""
    return max(1, int(np.diff(matrix.crow).max(initial=0)))


def moved_left(matrix: Csr, pad: int) -> Array:
    """Return an array (rows, widest row) with the listed values of each row at its left, and ``pad`` elsewhere."""
    padded = np.full((len(matrix), widest_row(matrix)), pad, matrix.dtype)
    padded[_places(matrix)] = matrix.values
    return padded


def _places(matrix: Csr) -> tuple[Array, Array]:
    """Return the rows and columns at which :func:`moved_left` puts the listed values."""
    row = np.repeat(np.arange(len(matrix)), np.diff(matrix.crow))
    return row, np.arange(len(matrix.col)) - matrix.crow[row]


def encode_tensor(array: Array, dtype: pb.DType) -> pb.Tensor:
    return pb.Tensor(dense=array.astype(_DTYPES[dtype]).tobytes(), dtype=dtype, shape=array.shape)


def encode_csr(padded: Array, matrix: Csr, dtype: pb.DType) -> pb.Tensor:
    """Return a sparse tensor with the cells of ``matrix`` and values from ``padded``, laid out as by ``moved_left``."""
    csr = pb.SparseCsr(
        values=padded[_places(matrix)].astype(_DTYPES[dtype]).tobytes(),
        crow_indices=matrix.crow.astype(_INDEX).tobytes(),
        col_indices=matrix.col.astype(_INDEX).tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=dtype, shape=matrix.shape)


def _widened(bfloat16: Array) -> Array:
    """Return bfloat16 numbers as float32: their 16 bits are the upper half of a float32."""
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)
