"""Fortran routines by the addresses that SciPy exports for Cython."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...base import DType

__all__ = ["LETTERS", "Routine", "routine"]

Routine: TypeAlias = Callable[..., None]
"""A routine that takes the addresses of its arguments."""

LETTERS = {DType.float32: "s", DType.float64: "d", DType.complex64: "c", DType.complex128: "z"}
"""The first letter of a routine's name, by the type of the elements."""

_FITTING = re.compile(rb"void \((\w+ \*(, )?)+\)")


def routine(exported: Mapping[str, Any], name: str, *, holds_lock: bool = False) -> Routine | None:
    """Make a routine callable; None where this SciPy's integers are not those that we pass.

    Args:
        exported: ``__pyx_capi__`` of the module.
        name: Name of the routine, with its letter.
        holds_lock: Whether it keeps the interpreter's lock while it computes.
    """
    capsule = exported[name]
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
