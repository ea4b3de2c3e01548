"""Errors of devices and libraries: one hierarchy for every backend.

A wrong argument is no `AccelError`: it is a `ValueError` or `TypeError`, raised in the
caller's task before anything is launched.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from ....actors import NotExecutedError

__all__ = [
    "AccelError",
    "CompilationError",
    "CompletionTimeoutError",
    "ContextLostError",
    "ContextPoisonedError",
    "DeviceLostError",
    "DriverError",
    "InputFailedError",
    "LibraryError",
    "LinAlgError",
    "NotSupportedError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "QueueFullError",
    "Refused",
    "StaleRefError",
]


@attrs.define(eq=False, slots=False)
class AccelError(Exception):
    """An error that a device, its driver or one of its libraries reported.

    Attributes:
        message: What happened and what to do about it.
        device: Name of the device, such as ``"cpu:0"``.
        operation: Name of the operation, such as ``"linalg.Matmul"``.
        generation: Generation of the device when it happened.
    """

    message: str
    device: str | None = attrs.field(default=None, kw_only=True)
    operation: str | None = attrs.field(default=None, kw_only=True)
    generation: int | None = attrs.field(default=None, kw_only=True)

    def __reduce__(self) -> tuple[object, ...]:
        fields = {field.alias: getattr(self, field.name) for field in attrs.fields(type(self))}
        return _rebuild, (type(self), fields)

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in ("device", "operation", "generation")}
        where = [f"{name} {value}" for name, value in values.items() if value is not None]
        return f"{self.message} ({', '.join(where)})" if where else self.message


@attrs.define(eq=False, slots=False)
class ContextLostError(AccelError):
    """This operation, or its result, was lost with what ran it; its outputs never become valid.

    That was the device's context: its worker has died or was killed, or it was replaced over an operation
    that hangs. A fault of the device is a `ContextPoisonedError`. Or it was a program that was made anew.

    Attributes:
        is_memory_damaged: Whether the hardware reported an uncorrectable error of its memory: the contents of
            no array on the device can be trusted.
        is_to_blame: Whether no other operation can have caused the loss: it was a fault of the device, and
            this one ran alone, or was the only one that had begun, or the others that had begun have run
            again without a fault.
    """

    is_memory_damaged: bool = attrs.field(default=False, kw_only=True, repr=False)
    is_to_blame: bool = attrs.field(default=False, kw_only=True, repr=False)


class ContextPoisonedError(ContextLostError):
    """The context was lost because the device has poisoned it: a fault of its hardware or of a kernel."""


@attrs.define(eq=False, slots=False)
class DeviceLostError(AccelError):
    """The device is closed, or was given up: more losses than its intensity allows, or no way to a context.

    Attributes:
        retry_after: Seconds until it is opened again; None where it is not.
    """

    retry_after: float | None = attrs.field(default=None, kw_only=True, repr=False)


@attrs.define(eq=False, slots=False)
class OutOfMemoryError(AccelError):
    """There is not enough device memory; the device stays usable.

    Attributes:
        requested: Bytes asked for.
        free: Bytes that were free.
        total: Bytes there are in all, or the configured limit.
    """

    requested: int = attrs.field(kw_only=True)
    free: int = attrs.field(kw_only=True)
    total: int = attrs.field(kw_only=True)


class StaleRefError(AccelError):
    """The memory behind a reference is gone (released, closed, lost), or damaged by an operation."""


class InputFailedError(AccelError):
    """An operation did not run because the one that makes its input failed (see ``__cause__``)."""


@attrs.define(eq=False, slots=False)
class LibraryError(AccelError):
    """A library refused the operation or could not finish it; library and device stay usable.

    Attributes:
        library: Name of the library, such as ``"blas"``.
        code: The library's own status, by name or number.
    """

    library: str = attrs.field(kw_only=True)
    code: int | str = attrs.field(kw_only=True)


@attrs.define(eq=False, slots=False)
class CompilationError(LibraryError):
    """Code of a kernel could not be compiled, linked or loaded, or has no kernel of that name.

    The message holds the compiler's log.

    Attributes:
        log: Output of the compiler or the linker, with the numbers of the lines.
        source: Name of the source, as the log has it.
        options: Options that it was compiled with.
    """

    log: str = attrs.field(default="", kw_only=True, repr=False)
    source: str = attrs.field(default="", kw_only=True)
    options: tuple[str, ...] = attrs.field(default=(), kw_only=True)


@attrs.define(eq=False, slots=False)
class LinAlgError(LibraryError, np.linalg.LinAlgError):
    """A matrix has no such factorization or solution, or it was not found; a `numpy.linalg.LinAlgError` too.

    It is singular, or not positive definite, or an iteration did not converge. Among such matrices of a
    stack, the error names the first. The `code` is the word of LAPACK's ``info``: for a singular matrix the
    number, from 1, of the pivot that is zero; for an indefinite one the order of the leading minor.

    Attributes:
        index: Where the matrix is in its stack; empty where there is no stack.
    """

    index: tuple[int, ...] = attrs.field(default=(), kw_only=True)


@attrs.define(eq=False, slots=False)
class OutOfRangeError(LibraryError, IndexError):
    """An array of indices holds one that is outside of its axis; an `IndexError` too.

    Attributes:
        index: That index, or one of several; of uint64 the largest number of int64 at most.
        axis: The axis.
        length: How many elements there are along it.
    """

    library: str = attrs.field(default="arrays", kw_only=True)
    code: int | str = attrs.field(default="index", kw_only=True)
    index: int = attrs.field(kw_only=True)
    axis: int = attrs.field(kw_only=True)
    length: int = attrs.field(kw_only=True)


@attrs.define(eq=False, slots=False)
class Refused(LibraryError):  # noqa: N818  # it is raised by users, about a request, and reads as one word
    """A program does not answer a request: its asker gets this, and the program goes on.

    Raise it in a method of a program. A method that updates arrays must say that it has changed no array:
    ``raise Refused("a negative price", unchanged=True)``. Otherwise it counts as any other error.

    Attributes:
        is_unchanged: Whether all arrays that the call was given have the contents that they had before.
    """

    library: str = attrs.field(default="program", kw_only=True)
    code: int | str = attrs.field(default="refused", kw_only=True)
    is_unchanged: bool = attrs.field(default=False, kw_only=True, alias="unchanged")


@attrs.define(eq=False, slots=False)
class DriverError(AccelError):
    """The driver reported an error that no other class describes.

    Attributes:
        code: The driver's own status, by name or number.
    """

    code: int | str = attrs.field(kw_only=True)


class CompletionTimeoutError(AccelError):
    """An operation did not complete within the time that the device's options allow."""


class QueueFullError(AccelError, NotExecutedError):
    """Too many requests wait for a device; the message names the limit. It was never executed."""


@attrs.define(eq=False, slots=False)
class NotSupportedError(AccelError):
    """The backend does not have this operation, dtype or option.

    Attributes:
        backend: Name of the backend that was asked.
    """

    backend: str | None = attrs.field(default=None, kw_only=True)


class NoEdgeError(RuntimeError):
    """Something happened that cannot happen in this stage of a life: an error of this package."""


def _rebuild(cls: type[AccelError], fields: dict[str, Any]) -> AccelError:
    return cls(**fields)
