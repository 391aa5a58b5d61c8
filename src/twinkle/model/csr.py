"""A sparse matrix in CSR form: only the listed values take memory, all other cells are zero.

A request of a hundred bytes may declare a matrix of millions of cells. The matrix stays sparse while the request waits
and while it is checked; its cells are written out for one micro-batch, or for one sequence, at a time.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Csr", "dense", "listed"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Csr:
    """Row t of (T, K) lists ``values[crow[t] : crow[t + 1]]``, in the columns ``col`` of the same places.

    The constructor checks nothing: its caller has checked that the arrays fit together. Columns increase within a row.
    """

    shape: tuple[int, int]
    crow: Array  # (T + 1,)
    col: Array  # (count,)
    values: Array  # (count,)

    @property
    def ndim(self) -> int:
        return 2

    @property
    def size(self) -> int:
        """Return the number of all cells, listed or not."""
        return self.shape[0] * self.shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Return the memory of the sparse form, in bytes."""
        return self.crow.nbytes + self.col.nbytes + self.values.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Convert to a dense array when a numpy function is given this matrix."""
        if copy is False:
            raise ValueError("the cells of a sparse matrix are not in memory: they are always written out anew")
        return self.dense() if dtype is None else self.dense().astype(dtype, copy=False)

    def astype(self, dtype: DTypeLike) -> "Csr":
        return Csr(self.shape, self.crow, self.col, self.values.astype(dtype, copy=False))

    def write_to(self, out_TK: Array) -> None:
        """Put the values into ``out_TK``, which is zero everywhere and has this shape."""
        row = np.repeat(np.arange(self.shape[0]), np.diff(self.crow))
        out_TK[row, self.col] = self.values

    def dense(self) -> Array:
        out_TK = np.zeros(self.shape, self.dtype)
        self.write_to(out_TK)
        return out_TK


def dense(array: Array | Csr) -> Array:
    """Return the array itself, or all cells of a sparse one."""
    return array.dense() if isinstance(array, Csr) else array


def listed(array: Array | Csr) -> Array:
    """Return the numbers that need to be checked: all of a dense array, the listed ones of a sparse array."""
    return array.values if isinstance(array, Csr) else array
