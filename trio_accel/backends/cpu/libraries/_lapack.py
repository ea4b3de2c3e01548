"""LAPACK's routines, applied to each matrix of a stack.

LAPACK is column-major: to it, a matrix whose rows lie together is the transpose of that matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np

from ...base import DType, NotSupportedError
from ..runtime._memory import HostArray
from ._routines import find

__all__ = ["Lapack", "check_size", "each"]

_LARGEST = 2**31 - 1
# A call that gives the interpreter's lock back may wait 5 ms to have it again. So of small matrices only one
# in each group gives it back: as many as together take so many steps, which is about 0.3 ms.
_GROUP = 300_000
_OVERHEAD = 2000
# Steps for each product of rows, columns and the lesser of them.
_STEPS = {"gesdd": 15, "geev": 25, **dict.fromkeys(("syevd", "heevd", "sygvd", "hegvd"), 8)}

_Argument: TypeAlias = "bytes | int | HostArray | list[int] | None"


class Lapack:
    """The routines for one type of element, and matrices of one shape.

    Args:
        dtype: Type of the elements.
        rows: Rows of the matrices.
        columns: Columns of the matrices.

    Raises:
        NotSupportedError: The matrices are too large for the routines, which count in 32 bits; or SciPy's
            routines count in another way.
    """

    def __init__(self, dtype: DType, rows: int, columns: int) -> None:
        self._type = dtype
        self._dtype = dtype.dtype
        self.is_complex: bool = dtype.kind == "complex"
        empty: HostArray = np.empty(0, self._dtype)
        self.real: np.dtype[Any] = np.real(empty).dtype
        self._product = rows * columns * min(rows, columns)
        if find(DType.float64, "potrf") is None:
            raise NotSupportedError(
                "this build of SciPy has a LAPACK with integers of 64 bits", backend="cpu"
            )
        check_size(f"matrices of {rows} × {columns}", max(rows, columns))

    def __call__(self, name: str, *arguments: _Argument) -> None:
        """Call a routine once for each matrix.

        Args:
            name: Name of the routine, without the letter of the type.
            arguments: Letters, sizes, and arrays, which are the same for each matrix; or addresses of
                `each`, of which there must be some.
        """
        sizes = np.array([value if isinstance(value, int) else 0 for value in arguments], np.int32)
        columns: list[Iterable[Any]] = []
        for place, value in enumerate(arguments):
            if isinstance(value, list):
                columns.append(value)
            elif isinstance(value, int):
                columns.append(repeat(sizes[place:].ctypes.data))
            else:
                columns.append(repeat(value.ctypes.data if isinstance(value, np.ndarray) else value))
        group = max(1, _GROUP // (_STEPS.get(name, 1) * self._product + _OVERHEAD))
        holding, free = (find(self._type, name, holds_lock=holds_lock) for holds_lock in (True, False))
        assert holding is not None
        assert free is not None
        for number, addresses in enumerate(zip(*columns, strict=False), 1):
            (holding if number % group else free)(*addresses)

    def with_workspace(self, name: str, *arguments: _Argument, more: tuple[_Argument, ...] = ()) -> None:
        """Call a routine that takes an array to work in, which is made as large as the routine likes best.

        Args:
            name: Name of the routine, without the letter of the type.
            arguments: What is before the workspace, and last what is behind `more`: where ``info`` goes.
            more: What is between the workspace and ``info``.
        """
        *before, info = arguments
        first = [value[:1] if isinstance(value, list) else value for value in arguments]
        best: HostArray = np.zeros(1, self._dtype)
        self(name, *first[:-1], best, -1, *more, first[-1])
        # Single precision may have rounded it down.
        work = np.empty(int(np.nextafter(np.real(best), np.inf)[0]) + 1, self._dtype)
        self(name, *before, work, len(work), *more, info)


def each(array: HostArray, axes: int = 2, stack: tuple[int, ...] | None = None) -> list[int]:
    """Addresses of the matrices of a stack, broadcast to another one if wanted.

    Args:
        array: The stack; its last `axes` axes are those of one item.
        axes: 2 for matrices, 1 for vectors, 0 for words.
        stack: The shape to broadcast to.
    """
    leading = array.ndim - axes
    found: HostArray = np.array(array.ctypes.data)
    for extent, stride in zip(array.shape[:leading], array.strides[:leading], strict=True):
        found = found[..., None] + np.arange(int(extent)) * int(stride)
    addresses: list[int] = np.broadcast_to(found, found.shape if stack is None else stack).ravel().tolist()
    return addresses


def check_size(what: str, size: int) -> None:
    """Refuse sizes that the routines cannot count.

    Raises:
        NotSupportedError: It is too large.
    """
    if size > _LARGEST:
        raise NotSupportedError(
            f"the CPU backend's LAPACK counts in 32 bits, {what} need {size}; allowed: {_LARGEST}",
            backend="cpu",
        )
