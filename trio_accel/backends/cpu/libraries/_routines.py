"""Routines of BLAS and LAPACK by the addresses that SciPy exports for Cython.

`scipy.linalg` holds the interpreter's lock while it computes. The same routines called by `ctypes` do not.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, cast

import scipy.linalg.cython_blas
import scipy.linalg.cython_lapack

from ...base import DType

__all__ = ["Routine", "find"]

Routine: TypeAlias = Callable[..., None]
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
def find(dtype: DType, name: str, *, holds_lock: bool = False) -> Routine | None:
    """A routine for a type of element; None where there is none, or its integers are not those that we pass.

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
