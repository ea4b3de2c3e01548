"""Open programs, programs that are ready to be made, and the errors of their calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import attrs

from ..backends.base import ContextLostError, LibraryError, Refused
from ..devices import AccelRef, Device
from ._method import ProgramMethod


@attrs.frozen(eq=False)
class StateArray:
    """An array among the arguments of a constructor.

    Attributes:
        parameter: The name of its parameter.
        position: Its position, such as ``"weights['bias']"``.
        ref: The array.
    """

    parameter: str
    position: str
    ref: AccelRef


@attrs.frozen(eq=False, kw_only=True)
class Opened:
    """An opened program.

    Attributes:
        device: The device.
        name: The name in the tree.
        target: The class or function.
        library: The import path of its actor, with its definition.
        frozen: Arrays of the constructor that none of its methods changes.
        state: The other arrays of the constructor.
        prepare_again: Prepares to make it again, with other arguments of the constructor.
        thaw: Allows others to write to the arrays in `frozen`.
        on_close: Called when it is closed.
    """

    device: Device
    name: str
    target: Callable[..., Any]
    library: str
    frozen: tuple[StateArray, ...]
    state: Sequence[StateArray]
    prepare_again: Callable[[Sequence[object], Mapping[str, object]], Awaitable[Anew]]
    thaw: Callable[[], None]
    on_close: Callable[[], None]


@attrs.frozen(eq=False)
class Anew:
    """A program that is ready to be made.

    Attributes:
        arrays: All arrays of its constructor.
        start: Makes it; a failure leaves no trace.
    """

    arrays: Sequence[StateArray]
    start: Callable[[], Awaitable[Opened]]

    def check(self, device: Device) -> None:
        """Refuse arrays that must not be used.

        Raises:
            StaleRefError: An array is damaged, lost or released.
            ValueError: An array is on another device.
        """
        for array in self.arrays:
            if array.ref.device is not device:
                problem = f"is on {array.ref.device.path}, not on {device.path}"
                raise ValueError(f"reset: {array.position}: the array {problem}")
            array.ref.block.check(f"reset: {array.position}", array.ref.spec)


async def never(args: Sequence[object], kwargs: Mapping[str, object]) -> Anew:
    raise AssertionError  # pragma: no cover  # a closed program is not made again


def own_error(refused: Refused, method: ProgramMethod) -> Exception:
    """Return the error by which a method has refused a request, of the class that the method declares."""
    cause, refused.__cause__ = refused.__cause__, None
    if refused.code not in range(len(method.refuses)):
        refused.__cause__ = cause
        return refused
    cls = method.refuses[cast("int", refused.code)]
    error = cause
    if not isinstance(error, cls):
        # A worker sends a class of the program's own as text.
        text = refused.message
        with suppress(Exception):
            error = cls(str(cause).removeprefix(f"{cls.__module__}.{cls.__qualname__}: "))
            for note in getattr(cause, "__notes__", ()):
                error.add_note(note)
        if not isinstance(error, cls):
            return Refused(text, device=refused.device, operation=refused.operation)
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        # No coroutine can raise them.
        refused.__cause__ = error
        return refused
    # `Batcher` knows a refusal by this.
    error.__cause__ = refused
    return error


def lost(method: ProgramMethod, error: LibraryError) -> ContextLostError:
    advice = "make the arrays that it changes again, then ask again" if method.changes else "ask again"
    return ContextLostError(
        f"the result of {method.full_name} was lost: the program was made again before it was fetched; "
        f"{advice}",
        device=error.device,
        operation=error.operation,
        generation=error.generation,
    )
