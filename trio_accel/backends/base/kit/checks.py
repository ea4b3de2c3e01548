"""Checks of libraries before anything is enqueued, in the same words on every backend."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ..contract.dtypes import DType
from ..contract.errors import LibraryError, NotSupportedError, OutOfRangeError
from ..contract.ops import ArraySpec, OperationSpec

__all__ = [
    "INEXACT",
    "INTEGERS",
    "NATIVE",
    "check_dtype",
    "check_structure",
    "misplaced",
    "no_element",
    "no_length",
    "scalar_of",
    "unordered",
]

_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

NATIVE = (DType.float32, DType.float64, DType.complex64, DType.complex128)
"""Types that BLAS has, computed in themselves."""

LOW_PRECISION = (DType.float16, DType.bfloat16)
"""Types that are computed in float32 and rounded once."""

INEXACT = (*LOW_PRECISION, *NATIVE)

INTEGERS = tuple(dtype for dtype in DType if dtype.kind in ("int", "uint"))
"""Types of integers, computed modulo two to the power of their bits."""

_FAULTS = {
    1: "indptr: {rows} rows need {more} elements from 0 to at most {stored}",
    2: "indptr: its elements must not decrease",
    3: "indices: a matrix of {columns} columns has them from 0 on",
    4: "indptr: it must end at the {stored} stored elements",
}


def check_dtype(backend: str, operation: str, dtype: DType, allowed: Collection[DType]) -> None:
    """Refuse an element type that an operation does not have.

    Raises:
        NotSupportedError: It is not among the allowed ones.
    """
    if dtype not in allowed:
        names = ", ".join(str(member) for member in allowed)
        raise NotSupportedError(
            f"the {backend.upper()} backend has no {operation} for {dtype}; it has {names}", backend=backend
        )


def check_dtypes(backend: str, spec: OperationSpec, allowed: Mapping[str, tuple[DType, ...]]) -> None:
    """Refuse an operation with dtypes that its kernel does not declare.

    Args:
        backend: Name of the backend.
        spec: The operation.
        allowed: The kernel's dtypes; see `DTypes`.

    Raises:
        NotSupportedError: The kernel does not declare a dtype.
    """
    for field, dtypes in allowed.items():
        name = field or next(
            spec_field.name for spec_field in spec.descriptor().fields if spec_field.is_array
        )
        array: ArraySpec | None = getattr(spec, name)
        if array is not None:
            operation = _words(spec.operation)
            check_dtype(backend, f"{operation} with {field}" if field else operation, array.dtype, dtypes)


def _words(operation: str) -> str:
    """Return the last name of an operation in small letters: ``copy_to_host`` of ``...CopyToHostSpec``."""
    return _CAPITAL.sub("_", operation.rpartition(".")[2].removesuffix("Spec")).lower()


def check_shapes(backend: str, library: str, spec: OperationSpec) -> None:
    """Refuse on a backend what `OperationSpec.check_shapes` refuses.

    Raises:
        NotSupportedError: Dtypes that do not fit.
        LibraryError: Shapes that do not fit.
    """
    try:
        spec.check_shapes(library)
    except TypeError as error:
        raise NotSupportedError(f"the {backend.upper()} backend: {error}", backend=backend) from error
    except ValueError as error:
        raise LibraryError(str(error), library=library, code="invalid_value") from error


def check_structure(fault: int, matrix: tuple[int, int], stored: int) -> None:
    """Refuse a sparse matrix because of a fault in its structure.

    Args:
        fault: 0 for none; 1 for row pointers that do not begin at 0, or end after the last stored element; 2
            for decreasing row pointers; 3 for a column out of range; 4 for row pointers that end before the
            last stored element.
        matrix: Its rows and columns.
        stored: The number of stored elements.

    Raises:
        LibraryError: There is a fault.
    """
    if fault:
        rows, columns = matrix
        text = _FAULTS[fault].format(rows=rows, more=rows + 1, columns=columns, stored=stored)
        raise LibraryError(text, library="sparse", code="invalid_value")


def unordered(row: int) -> LibraryError:
    """Make the error of a sparse matrix with a row of columns that do not ascend."""
    text = f"the columns of row {row} do not ascend; bring them into order: sparse.sum_duplicates"
    return LibraryError(text, library="sparse", code="invalid_value")


def misplaced(argument: str, index: int, value: int, limit: int) -> LibraryError:
    """Make the error of a sparse matrix's index that is out of range."""
    text = f"{argument}[{index}] is {value}; it must be from 0 to {limit - 1}"
    return LibraryError(text, library="sparse", code="invalid_value")


def no_element(index: int, size: int) -> OutOfRangeError:
    """Make the error of a pooling's index that is outside of its input."""
    text = f"indices: {index} is outside of the input, which has {size} elements in each channel"
    return OutOfRangeError(text, library="dnn", index=index, axis=2, length=size)


def no_length(argument: str, number: int, limit: int) -> OutOfRangeError:
    """Make the error of a length, or a block, that an attention does not have."""
    text = f"there is no block {number} of {limit}"
    if argument != "block_table":
        text = f"{number} is not a length of an axis of {limit}"
    return OutOfRangeError(f"{argument}: {text}", library="dnn", index=number, axis=0, length=limit)


def scalar_of(library: str, name: str, value: complex, dtype: DType) -> complex:
    """Convert a factor to the kind of number that a type can hold: an int stays an int.

    Raises:
        LibraryError: The factor has an imaginary part, and the type is real.
    """
    if dtype.kind == "complex":
        return value
    if value.imag:
        raise LibraryError(
            f"{name}: {value!r} has an imaginary part, which {dtype} cannot hold",
            library=library,
            code="invalid_value",
        )
    return value.real
