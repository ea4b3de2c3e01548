"""A function as one operation, without opening it first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, cast

import attrs
import trio

from ..actors import Backoff, Intensity
from ..devices import AccelRef, Device
from ._method import Method
from ._open import Plan
from ._program import FunctionProgram

__all__ = ["run"]

P = ParamSpec("P")

_MOST_KEPT = 32
"""Functions that stay open on a device; each costs a stream, and is made again after a loss."""

# Only a function that declares updates can fail. It has no state: to make it anew is free.
_ALWAYS = Intensity(1_000_000, 1.0)
_AT_ONCE = Backoff(base=0.0)


async def run(function: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Any:
    """Run a function where its arrays are, as one supervised operation.

    The function gets NumPy arrays on the CPU backend; on CUDA, objects that CuPy, PyTorch and JAX take
    without a copy. It is ordered with other operations by the arrays that it gets, and is timed, cancelled
    and run again after a loss (`DeviceOptions.retry`) like them. It runs on the device of its arrays.

    At its first run on a device it is opened there, as by `open_program`, and stays open. The 32 functions
    that were used last do. With `programs.method` it may declare its result (``out=``), which saves an
    operation, and which of its arguments it changes (``updates=``).

    Args:
        function: A function at the level of a module that the worker can import.
        args: Its arguments: arrays of one device, at least one; NumPy arrays, which are copied there first;
            None, numbers, strings, bytes, and dicts, lists and tuples of these.
        kwargs: The same, by name.

    Returns:
        The function's result, with references in place of arrays. They share no memory with its arguments.

    Raises:
        TypeError, ValueError: No array of a device, arrays of several, or arguments that the function does
            not take; a function that another process cannot import (a lambda, a closure, one of
            ``__main__``), or that is async or a generator.
        StaleRefError: An array was released or lost.
        ImportError: The worker cannot import the module.
        NotSupportedError: The backend runs no programs.
        Exception: The function's own error, with a note that names the function. Nothing restarts. From a
            worker, a class of your own arrives as itself if the function declares it (``refuses=``), and
            otherwise as an error that has its text.
        ActorFailedError: The function declares `updates` and raised; its arrays are damaged.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    if isinstance(function, type):
        raise TypeError(f"run: {function.__qualname__} is a class, and must be a function; see open_program")
    device = _device_of(function, (args, kwargs))
    # On the device, as a weak dictionary would be kept by its own values.
    functions: _Functions | None = vars(device).get("_functions")
    if functions is None:
        functions = vars(device)["_functions"] = _Functions(device)
    program = functions.kept.get(function) or await functions.open(function)
    functions.use(function)
    return await program.ask(*args, **kwargs)


class _Run(FunctionProgram[...]):
    """A function that was not opened by the program: its errors are those of the asker."""

    def _find(self, given: object) -> Method:
        method = super()._find(given)
        return attrs.evolve(method, refuses=(*method.refuses, Exception))


class _Functions:
    """The functions that are open on a device; the one that was used last is the last."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._opening: dict[Callable[..., Any], trio.Event] = {}
        self.kept: dict[Callable[..., Any], _Run] = {}

    def use(self, function: Callable[..., Any]) -> None:
        self.kept[function] = self.kept.pop(function)

    async def open(self, function: Callable[..., Any]) -> _Run:
        """Open a function; several who ask for the same open it once."""
        while (event := self._opening.get(function)) is not None:
            await event.wait()
            if function in self.kept:
                return self.kept[function]
        plan = Plan(self._device, function, (), {}, None, _ALWAYS, _AT_ONCE, asked_by="run", refuses_all=True)
        event = self._opening[function] = trio.Event()
        try:
            idle = [other for other, program in self.kept.items() if not program.is_asking]
            for other in idle[: max(0, len(self.kept) + len(self._opening) - _MOST_KEPT)]:
                await self.kept.pop(other).aclose()
            program = self.kept[function] = _Run(await plan.open())
            return program
        finally:
            del self._opening[function]
            event.set()


def _device_of(function: object, values: object) -> Device:
    """Return the device of the first array among the arguments; the operation checks the others."""
    for value in _leaves(values):
        if isinstance(value, AccelRef):
            return value.device
    name = getattr(function, "__qualname__", repr(function))
    raise TypeError(
        f"run: {name} must get an array of a device, as it runs where its arrays are; put one there first: "
        "x = await device.put(array)"
    )


def _leaves(value: object) -> Iterable[object]:
    """The values in nested collections. A stack, as collections may be nested deeper than calls may."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Mapping):
            waiting += reversed(list(cast("Mapping[object, object]", found).values()))
        elif isinstance(found, (list, tuple)):
            waiting += reversed(list(cast("Sequence[object]", found)))
        else:
            yield found
