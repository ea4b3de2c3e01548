"""Specifications of the memory operations that every device has."""

from __future__ import annotations

from typing import Any

import attrs
import numpy.typing as npt

from ._host_use import HostUse
from ._spec import ArraySpec, NumberRole, OperationSpec, number, reads, writes

__all__ = ["CopyFromHostSpec", "CopySpec", "CopyToHostSpec", "FillSpec"]


class _HostCopySpec(OperationSpec):
    """A copy from or to a host array."""

    # Set when it is enqueued, by a backend that can tell. No field of the specification.
    __slots__ = ("_use",)
    _use: HostUse

    @property
    def use(self) -> HostUse | None:
        """How the backend uses the host array; None if the device itself does, until the copy is done."""
        return getattr(self, "_use", None)

    def note_use(self, use: HostUse) -> None:
        """Say how the host array is used from now on; by the backend, when it enqueues the copy."""
        self._use = use


@attrs.define(on_setattr=None, unsafe_hash=True)
class CopyFromHostSpec(_HostCopySpec):
    """Copy a host array of the same shape and dtype into device memory."""

    host: npt.NDArray[Any]
    out: ArraySpec = writes()


@attrs.define(on_setattr=None, unsafe_hash=True)
class CopyToHostSpec(_HostCopySpec):
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
