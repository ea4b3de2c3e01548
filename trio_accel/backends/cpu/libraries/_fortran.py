"""Operations on matrices by routines of the BLAS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...base import DType, NotSupportedError
from ...base.blas import Factor, Matrix, Plan, Routine
from ...base.checks import scalar_of
from ...base.ops import ArraySpec, OperationSpec
from ..runtime._memory import HostArray
from ._routines import find

__all__ = ["LONGEST", "Blas"]

LONGEST = 1 << 30
"""Sizes that the routines can count: they do in 32 bits."""


class Blas:
    """Operations on matrices of one plan, by a routine.

    Args:
        dtype: Type of the elements.
        plan: How they are run.

    Raises:
        NotSupportedError: A size that the routine cannot count, or this SciPy does not have it.
    """

    def __init__(self, dtype: DType, plan: Plan) -> None:
        self._plan = plan
        routines = [routine for routine in (plan.routine, plan.plain) if routine is not None]
        self._calls = {routine.name: _Call(dtype, routine) for routine in routines}

    def run(self, spec: Any, view: Callable[[ArraySpec], HostArray]) -> None:
        """Run an operation."""
        routine = self._plan.routine_for(spec)
        if routine is None:
            return
        call = self._calls[routine.name]
        arrays = {field: view(getattr(spec, field)) for field in self._plan.steps}
        factors = call.factors(spec)
        if "out" in arrays and spec.b != spec.out:
            np.copyto(arrays["out"], view(spec.b))
        copies = {
            field: np.array(arrays[field] if order == "C" else arrays[field].swapaxes(-1, -2), order="C")
            for field, order in self._plan.copies.items()
        }
        addresses = {field: array.ctypes.data for field, array in {**arrays, **copies}.items()}
        for places in self._plan.calls(addresses):
            call(places, factors)
        for field in copies.keys() & {"c", "out"}:
            np.copyto(arrays[field], copies[field])


class _Call:
    """A call of a routine: all that it is told but factors and addresses of arrays."""

    def __init__(self, dtype: DType, routine: Routine) -> None:
        call = find(dtype, routine.name)
        sizes = [value if isinstance(value, int) else 0 for value in routine.arguments]
        if call is None or max(sizes) >= 2 * LONGEST:
            raise NotSupportedError(
                f"SciPy's {routine.name} with integers of 32 bits is needed, for sizes below 2**31",
                backend="cpu",
            )
        self._call = call
        self._dtype = dtype
        self._sizes = np.array(sizes, np.int32)
        self._matrices: dict[int, str] = {}
        self._factors: dict[int, Factor] = {}
        self._pointers: list[int | bytes] = []
        first: int = self._sizes.ctypes.data
        for place, value in enumerate(routine.arguments):
            self._pointers.append(value.encode() if isinstance(value, str) else first + 4 * place)
            if isinstance(value, Matrix):
                self._matrices[place] = value.field
            elif isinstance(value, Factor):
                self._factors[place] = value

    def factors(self, spec: OperationSpec) -> dict[int, HostArray]:
        """Factors of an operation, by their places.

        Raises:
            LibraryError: One has an imaginary part, and the type has none.
        """
        dtype = self._dtype
        return {
            place: np.array(scalar_of("blas", factor.field, factor.of(spec), dtype), dtype.dtype)
            for place, factor in self._factors.items()
        }

    def __call__(self, addresses: Mapping[str, int], factors: Mapping[int, HostArray]) -> None:
        """Call the routine, without the interpreter's lock."""
        pointers = self._pointers.copy()
        for place, field in self._matrices.items():
            pointers[place] = addresses[field]
        for place, number in factors.items():
            pointers[place] = number.ctypes.data
        self._call(*pointers)
