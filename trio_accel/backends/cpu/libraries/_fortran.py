"""Routines of BLAS and LAPACK by the addresses that SciPy exports for Cython.

`scipy.linalg` holds the interpreter's lock while it computes. The same routines called by `ctypes` do not.
They are column-major: to them, a matrix with contiguous rows is the transpose of that matrix.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable
from functools import cache
from itertools import repeat
from typing import Any, TypeAlias, cast

import numpy as np
import scipy.linalg.cython_blas
import scipy.linalg.cython_lapack

from ...base import ArraySpec, DType, HostArray, Ints, NotSupportedError, scalar_of
from ...base.kit.blas import BlasPlan, BlasRoutine, Matrix, ScalarArgument

FortranRoutine: TypeAlias = Callable[..., None]
"""A routine that takes the addresses of its arguments."""

# The first letter of a routine's name, by the type of the elements.
_LETTERS = {DType.float32: "s", DType.float64: "d", DType.complex64: "c", DType.complex128: "z"}
# LAPACK has what the BLAS lacks: products of complex symmetric matrices and vectors.
_EXPORTED = cast(
    "dict[str, Any]",
    {**scipy.linalg.cython_lapack.__pyx_capi__, **scipy.linalg.cython_blas.__pyx_capi__},
)
_FITTING = re.compile(rb"void \((\w+ \*(, )?)+\)")


@cache
def find(dtype: DType, name: str, *, holds_lock: bool = False) -> FortranRoutine | None:
    """Find a routine for a type of element; None where it is missing, or has other integers than we pass.

    Args:
        dtype: Type of the elements.
        name: Name of the routine, without the letter of the type.
        holds_lock: Whether it keeps the interpreter's lock while it computes.
    """
    capsule = _EXPORTED.get(_LETTERS.get(dtype, "") + name)
    if capsule is None:
        return None
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    address_of = ctypes.pythonapi.PyCapsule_GetPointer
    address_of.restype, address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature: bytes = name_of(capsule)
    if not _FITTING.fullmatch(signature) or not re.search(rb"[( ]int \*", signature):
        return None
    # CFUNCTYPE gives the interpreter's lock back during the call, PYFUNCTYPE does not.
    kind = ctypes.PYFUNCTYPE if holds_lock else ctypes.CFUNCTYPE
    return kind(None, *[ctypes.c_void_p] * signature.count(b"*"))(address_of(capsule, signature))


LONGEST = 1 << 30
"""Sizes that the routines can count: they do in 32 bits."""


class Blas:
    """Operations on matrices of one plan, by a routine.

    Args:
        dtype: Type of the elements.
        plan: How they are run.

    Raises:
        NotSupportedError: A size is too large for the routine, or this SciPy lacks the routine.
    """

    def __init__(self, dtype: DType, plan: BlasPlan) -> None:
        self._dtype, self._plan = dtype, plan
        # The sizes of each routine, which its arguments point to.
        self._sizes: dict[str, HostArray] = {}
        self._arguments: dict[str, list[int | bytes | ScalarArgument | Matrix]] = {}
        for routine in (plan.routine, plan.plain):
            if routine is not None:
                self._prepare(routine)

    def _prepare(self, routine: BlasRoutine) -> None:
        integers = [value if isinstance(value, int) else 0 for value in routine.arguments]
        if find(self._dtype, routine.name) is None or max(integers) >= 2 * LONGEST:
            raise NotSupportedError(
                f"SciPy's {routine.name} with integers of 32 bits is needed, for sizes below 2**31",
                backend="cpu",
            )
        sizes = self._sizes[routine.name] = np.array(integers, np.int32)
        first: int = sizes.ctypes.data
        self._arguments[routine.name] = [
            value.encode()
            if isinstance(value, str)
            else first + 4 * index
            if isinstance(value, int)
            else value
            for index, value in enumerate(routine.arguments)
        ]

    def run(self, spec: Any, view: Callable[[ArraySpec], HostArray]) -> None:
        """Run an operation, without the interpreter's lock.

        Raises:
            LibraryError: A factor has an imaginary part, and the type is real.
        """
        plan, dtype, routine = self._plan, self._dtype, self._plan.routine_for(spec)
        call = None if routine is None else find(dtype, routine.name)
        if routine is None or call is None:
            return
        arguments = self._arguments[routine.name]
        factors = {
            value: np.array(scalar_of("blas", value.field, value.of(spec), dtype), dtype.dtype)
            for value in arguments
            if isinstance(value, ScalarArgument)
        }
        arrays = {field: view(getattr(spec, field)) for field in plan.steps}
        if "out" in arrays and spec.b != spec.out:
            np.copyto(arrays["out"], view(spec.b))
        copies = {
            field: np.array(arrays[field] if order == "C" else arrays[field].swapaxes(-1, -2), order="C")
            for field, order in plan.copies.items()
        }
        starts = {field: array.ctypes.data for field, array in {**arrays, **copies}.items()}
        address_lists = {field: plan.addresses(field, first).tolist() for field, first in starts.items()}
        columns: list[Iterable[Any]] = []
        for value in arguments:
            if isinstance(value, Matrix):
                columns.append(address_lists[value.field])
            else:
                columns.append(
                    repeat(factors[value].ctypes.data if isinstance(value, ScalarArgument) else value)
                )
        for addresses in zip(*columns, strict=False):
            call(*addresses)
        for field in copies.keys() & {"c", "out"}:
            np.copyto(arrays[field], copies[field])


_LARGEST = 2**31 - 1
# A call that releases the interpreter's lock may wait 5 ms to get it back. So among small matrices, only one
# call in each group releases it. A group takes this number of steps, which is about 0.3 ms.
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
                `addresses_of`, of which there must be some.
        """
        sizes = np.array([value if isinstance(value, int) else 0 for value in arguments], np.int32)
        columns: list[Iterable[Any]] = []
        for index, value in enumerate(arguments):
            if isinstance(value, list):
                columns.append(value)
            elif isinstance(value, int):
                columns.append(repeat(sizes[index:].ctypes.data))
            else:
                columns.append(repeat(value.ctypes.data if isinstance(value, np.ndarray) else value))
        group = max(1, _GROUP // (_STEPS.get(name, 1) * self._product + _OVERHEAD))
        holding, free = (find(self._type, name, holds_lock=holds_lock) for holds_lock in (True, False))
        assert holding is not None
        assert free is not None
        for number, addresses in enumerate(zip(*columns, strict=False), 1):
            (holding if number % group else free)(*addresses)

    def with_workspace(self, name: str, *arguments: _Argument, extra: tuple[_Argument, ...] = ()) -> None:
        """Call a routine with a workspace of the size that it likes best.

        Args:
            name: Name of the routine, without the letter of the type.
            arguments: The arguments before the workspace; the last of them is ``info``, which is passed after
                `extra`.
            extra: The arguments between the workspace and ``info``.
        """
        *leading, info = arguments
        first = [value[:1] if isinstance(value, list) else value for value in arguments]
        best: HostArray = np.zeros(1, self._dtype)
        self(name, *first[:-1], best, -1, *extra, first[-1])
        # Single precision may have rounded it down.
        work = np.empty(int(np.nextafter(np.real(best), np.inf)[0]) + 1, self._dtype)
        self(name, *leading, work, len(work), *extra, info)


def addresses_of(array: HostArray, axes: int = 2, stack: Ints | None = None) -> list[int]:
    """Return the addresses of the matrices in a stack, optionally broadcast to another shape.

    Args:
        array: The stack; its last `axes` axes belong to one item.
        axes: 2 for matrices, 1 for vectors, 0 for words.
        stack: The shape to broadcast to.
    """
    leading = array.ndim - axes
    starts: HostArray = np.array(array.ctypes.data)
    for extent, stride in zip(array.shape[:leading], array.strides[:leading], strict=True):
        starts = starts[..., None] + np.arange(int(extent)) * int(stride)
    addresses: list[int] = np.broadcast_to(starts, starts.shape if stack is None else stack).ravel().tolist()
    return addresses


def check_size(label: str, size: int) -> None:
    """Refuse sizes that the routines cannot count.

    Raises:
        NotSupportedError: It is too large.
    """
    if size > _LARGEST:
        raise NotSupportedError(
            f"the CPU backend's LAPACK counts in 32 bits, {label} need {size}; allowed: {_LARGEST}",
            backend="cpu",
        )
