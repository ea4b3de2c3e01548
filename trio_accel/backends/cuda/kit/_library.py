"""A vendor's library of one CUDA device: a table of what enqueues what."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from ...base import AccelError, AccelStream, LibraryError, NotSupportedError, OutOfMemoryError
from ...base.ops import OperationSpec
from ..runtime._driver import CudaMemoryError
from ..runtime._stream import CudaStream
from ._device import LibraryDevice

__all__ = ["CudaLibrary", "Enqueue", "Table"]

Enqueue: TypeAlias = Callable[[Any, CudaStream], None]
"""Enqueues one operation, or raises and enqueues nothing; the device's context is current."""

Table: TypeAlias = Mapping[type[OperationSpec], Enqueue]


class CudaLibrary:
    """Base of the libraries. Made in a thread, with the device's context current.

    A subclass fills `_table`, makes its handle in `__init__` and destroys it in `_destroy`.

    Attributes:
        name: Name of the library, such as ``"blas"``.
        statuses: The exception class of the vendor's bindings, whose `status` is its code.
        codes: The bindings' enumeration of codes.
        refused: Names of those statuses that say that the operation, and not the library, is at fault.
    """

    name: ClassVar[str]
    statuses: ClassVar[type[Exception] | None] = None
    codes: ClassVar[type[enum.IntEnum] | None] = None
    refused: ClassVar[frozenset[str]] = frozenset()
    exhausted: ClassVar[frozenset[str]] = frozenset()
    missing: ClassVar[frozenset[str]] = frozenset()

    _table: Table

    def __init__(self, device: LibraryDevice) -> None:
        self._device = device
        self._context = device.context
        self._is_closed = False

    @property
    def operations(self) -> frozenset[type[OperationSpec]]:
        """Specifications that `enqueue` takes."""
        return frozenset(self._table)

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Nothing to do; see `KernelLibrary.prepare`."""
        return None

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if type(stream) is not CudaStream and not isinstance(stream, CudaStream):
            raise TypeError(f"stream: the CUDA backend enqueues on its own streams, not on {stream!r}")
        enqueue = self._table.get(type(spec))
        if enqueue is None:
            raise NotSupportedError(
                f"the CUDA backend's library {self.name!r} has no {type(spec).__name__}",
                backend="cuda",
                device=self._device.info.name,
            )
        context = self._context
        if stream.is_closed or context.is_lost:
            stream.check()
        stream.begin_heavy()
        # Like `with context`, which takes longer as it remembers what a whole thread has to restore.
        is_foreign = context.make_current()
        try:
            enqueue(spec, stream)
        except Exception as error:
            told = self._told(error)
            if told is error:
                raise
            raise told from error
        finally:
            if is_foreign:
                context.restore()

    def close(self) -> None:
        """Give handles and workspaces back; a lost context keeps them, as it would refuse to."""
        if not self._context.is_dead and not self._is_closed:
            self._is_closed = True
            with self._context:
                self._destroy()

    def _destroy(self) -> None:
        """Destroy the handle; the context is current."""

    def _in_context(self, function: Callable[..., object], *arguments: object) -> None:
        """Call something with the context current; what fails is told in the errors of backends."""
        try:
            with self._context:
                function(*arguments)
        except Exception as error:
            told = self._told(error)
            if told is error:
                raise
            raise told from error

    def _told(self, error: Exception) -> Exception:
        """What failed, in the errors of backends."""
        if isinstance(error, AccelError):
            error.device = self._device.info.name
            return error
        if isinstance(error, CudaMemoryError):
            return self._exhausted()
        if self.statuses is None or not isinstance(error, self.statuses):
            return error
        return self._error_of(error)

    def _error_of(self, error: Exception) -> Exception:
        """What a vendor's status means."""
        # The library may have met what only the driver can name.
        self._context.look()
        failure = self._context.failure()
        if failure is not None:
            return failure
        status = getattr(error, "status", error)
        name = self.codes(status).name if self.codes is not None and isinstance(status, int) else str(status)
        if name in self.exhausted:
            return self._exhausted()
        if name in self.missing:
            return NotSupportedError(f"{self.name}: {error}", backend="cuda")
        if name in self.refused:
            return LibraryError(f"{self.name} refused: {error}", library=self.name, code=name)
        # Its state cannot be trusted: the actor restarts with a new handle.
        return error

    def _exhausted(self) -> OutOfMemoryError:
        return self._device.addresses.exhausted(0)
