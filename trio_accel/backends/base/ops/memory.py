"""Specifications of the memory operations that every device has."""

from __future__ import annotations

from typing import Any

import attrs
import numpy.typing as npt

from ._spec import ArraySpec, NumberRole, OperationSpec, number, reads, writes

__all__ = ["CopyFromHostSpec", "CopySpec", "CopyToHostSpec", "FillSpec"]


@attrs.define(on_setattr=None, unsafe_hash=True)
class CopyFromHostSpec(OperationSpec):
    """Copy a host array of the same shape and dtype into device memory."""

    host: npt.NDArray[Any]
    out: ArraySpec = writes()


@attrs.define(on_setattr=None, unsafe_hash=True)
class CopyToHostSpec(OperationSpec):
    """Copy device memory into a writable host array of the same shape and dtype."""

    host: npt.NDArray[Any]
    source: ArraySpec = reads()


@attrs.define(on_setattr=None, unsafe_hash=True)
class CopySpec(OperationSpec):
    """Copy between device arrays of one shape, converting the dtype where they differ."""

    source: ArraySpec = reads()
    out: ArraySpec = writes()


@attrs.define(on_setattr=None, unsafe_hash=True)
class FillSpec(OperationSpec):
    """Set every element to one value, which the dtype can hold.

    A Python integer stays exact: an `int64` beyond 2**53 is no `complex`.
    """

    value: int | float | complex | bool = number(NumberRole.ELEMENT, "out")
    out: ArraySpec = writes()
