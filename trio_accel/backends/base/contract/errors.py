"""Errors of devices and libraries: one hierarchy for every backend.

A wrong argument raises `ValueError` or `TypeError` instead, in the caller's task, before anything is
launched.
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
    "function_of",
    "name_function",
    "operation_of",
]

# Function names by operation name. A message class names its operation.
_FUNCTIONS: dict[str, str] = {}


def name_function(operation: str, function: str) -> None:
    """Let errors name an operation by its function, such as ``linalg.cholesky`` for ``linalg.Cholesky``."""
    _FUNCTIONS[operation] = function


def function_of(operation: str) -> str:
    """Return the name of an operation's function, or of the operation if programs ask it by its message."""
    return _FUNCTIONS.get(operation, operation)


def operation_of(name: str) -> str:
    """Return the name of the operation that a function asks, or the argument if that is an operation."""
    return next((operation for operation, function in _FUNCTIONS.items() if function == name), name)


@attrs.define(eq=False, slots=False)
class AccelError(Exception):
    """An error that a device, its driver or one of its libraries reported.

    Attributes:
        message: What happened and what to do about it.
        device: Name of the device, such as ``"cpu:0"``.
        operation: Name of the operation, such as ``"linalg.Matmul"``. The text of the error has the name of
            its function, ``linalg.matmul``.
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
        if self.operation is not None:
            values["operation"] = function_of(self.operation)
        details = [f"{name} {value}" for name, value in values.items() if value is not None]
        return f"{self.message} ({', '.join(details)})" if details else self.message


@attrs.define(eq=False, slots=False)
class ContextLostError(AccelError):
    """The operation, or its result, was lost with its context or program; its outputs never become valid.

    A context is lost when its worker dies or is killed, or when it is replaced because an operation hangs. If
    the device has failed, the error is a `ContextPoisonedError`. A program is lost when it restarts.

    Attributes:
        is_memory_damaged: Whether the hardware reported an uncorrectable memory error, so that the contents
            of no array on the device can be trusted.
        is_to_blame: Whether no other operation can have caused the loss: the device failed, and this
            operation ran alone, or was the only one that had begun, or the others that had begun have run
            again without a fault.
    """

    is_memory_damaged: bool = attrs.field(default=False, kw_only=True, repr=False)
    is_to_blame: bool = attrs.field(default=False, kw_only=True, repr=False)


class ContextPoisonedError(ContextLostError):
    """The context was lost because a fault in the hardware or a kernel poisoned it."""


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
        requested: The number of bytes requested.
        free: The number of free bytes.
        total: The number of bytes in all, or the configured limit.
    """

    requested: int = attrs.field(kw_only=True)
    free: int = attrs.field(kw_only=True)
    total: int = attrs.field(kw_only=True)


class StaleRefError(AccelError):
    """The memory of a reference was released, closed or lost, or an operation has damaged it."""


class InputFailedError(AccelError):
    """The operation did not run because the operation that makes its input failed (see ``__cause__``)."""


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
    """A kernel's code could not be compiled, linked or loaded, or lacks a kernel with that name.

    The message holds the compiler's log.

    Attributes:
        log: Output of the compiler or the linker, with line numbers.
        source: Name of the source in the log.
        options: The compiler options.
    """

    log: str = attrs.field(default="", kw_only=True, repr=False)
    source: str = attrs.field(default="", kw_only=True)
    options: tuple[str, ...] = attrs.field(default=(), kw_only=True)


@attrs.define(eq=False, slots=False)
class LinAlgError(LibraryError, np.linalg.LinAlgError):
    """A matrix has no such factorization or solution, or none was found; also a `numpy.linalg.LinAlgError`.

    The matrix is singular, or not positive definite, or an iteration did not converge. In a stack, the error
    names the first such matrix. `code` is LAPACK's ``info``: for a singular matrix the number, from 1, of the
    zero pivot; for an indefinite matrix the order of the leading minor.

    Attributes:
        index: The position of the matrix in its stack; empty without a stack.
    """

    index: tuple[int, ...] = attrs.field(default=(), kw_only=True)


@attrs.define(eq=False, slots=False)
class OutOfRangeError(LibraryError, IndexError):
    """An array of indices holds an index outside of its axis; also an `IndexError`.

    Attributes:
        index: That index, or one of several; of uint64 the largest number of int64 at most.
        axis: The axis.
        length: The number of elements along it.
    """

    library: str = attrs.field(default="arrays", kw_only=True)
    code: int | str = attrs.field(default="index", kw_only=True)
    index: int = attrs.field(kw_only=True)
    axis: int = attrs.field(kw_only=True)
    length: int = attrs.field(kw_only=True)


@attrs.define(eq=False, slots=False)
class Refused(LibraryError):  # noqa: N818  # it is raised by users, about a request, and reads as one word
    """A program refuses a request: the caller gets this error, and the program continues.

    Raise it in a method of a program. A method that updates arrays must declare that it has changed none:
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
        backend: Name of the backend.
    """

    backend: str | None = attrs.field(default=None, kw_only=True)


class NoEdgeError(RuntimeError):
    """Something happened that cannot happen in this stage of a life: an error of this package."""


def _rebuild(cls: type[AccelError], fields: dict[str, Any]) -> AccelError:
    return cls(**fields)
