"""Kernels of the user's own on the CPU: functions named by their import paths."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from ....actors import describe
from ...base import HostArray, HostCall, LibraryError, kernel
from ...base.contract.ops import KernelDefinition, KernelSpec, scalar_offsets
from ...base.kit.lent import Keepers, Lent
from ..compiled import _kernels as kernels
from .arrays import loop

__all__ = ["launch", "loop"]

_Function: TypeAlias = Callable[..., object]
# The arrays of each role, with the names of their parameters.
_LentByRole: TypeAlias = dict[str, list[tuple[str, Lent]]]

_keepers = Keepers()


def _plan(spec: KernelSpec, device: object) -> KernelDefinition:
    """Decode the definition, and compile the source of a kernel without a function."""
    definition = KernelDefinition.decode(spec.definition)
    if definition.cpu is None:
        kernels.find(spec.definition)
    return definition


@kernel(KernelSpec, backend="cpu", plan=_plan)
def launch(spec: KernelSpec, call: HostCall[KernelDefinition]) -> None:
    """Call a kernel's function, which gets its arguments in the order of its parameters; else its source."""
    if 0 in spec.grid:
        return
    definition = call.plan
    if definition.cpu is None:
        kernels.launch(spec, call)
        return
    lent: _LentByRole = {"read": [], "update": [], "write": []}
    _call(spec, call, lent)
    read, written = lent["read"], lent["update"] + lent["write"]
    if any(reference() is not None for _, reference in read + written):
        label = f"kernel {definition.name!r}: its function {definition.cpu}"

        def named(ids: set[int]) -> str:
            return ", ".join(name for name, reference in read + written if id(reference) in ids)

        try:
            _keepers.report_kept(
                label, [reference for _, reference in read], [reference for _, reference in written], named
            )
        except RuntimeError as error:
            raise LibraryError(str(error), library="jit", code="kept") from None


def _call(spec: KernelSpec, call: HostCall[KernelDefinition], lent: _LentByRole) -> None:
    """Call the function; after it returns, nothing here refers to its arguments."""
    definition = call.plan
    arrays = {"read": iter(spec.read), "update": iter(spec.updated), "write": iter(spec.written)}
    scalars = iter(_scalars(definition, spec.scalars))
    arguments: list[Any] = []
    for parameter in definition.parameters:
        if parameter.role == "scalar":
            arguments.append(next(scalars))
        else:
            view = call.array(next(arrays[parameter.role]), write=parameter.role != "read")
            lent[parameter.role].append((parameter.name, ref(view.base)))
            arguments.append(view)
    _run(definition, arguments)


def _scalars(definition: KernelDefinition, content: bytes) -> list[Any]:
    """Return the scalars as NumPy's, of the declared types."""
    dtypes = definition.scalars
    offsets, _ = scalar_offsets(dtypes)
    return [
        np.frombuffer(content, dtype.dtype, 1, offset)[0]
        for dtype, offset in zip(dtypes, offsets, strict=True)
    ]


def _run(definition: KernelDefinition, arguments: list[Any]) -> None:
    """Call the function, by way of packed arrays where it wants these."""
    function = _find(definition.name, definition.cpu or "")
    copies: list[tuple[HostArray, HostArray]] = []
    for number, parameter in enumerate(definition.parameters):
        if parameter.layout == "packed" and not arguments[number].flags.c_contiguous:
            packed = np.ascontiguousarray(arguments[number])
            if parameter.role != "read":
                copies.append((arguments[number], packed))
            arguments[number] = packed
    try:
        with _as_library_errors(f"kernel {definition.name!r}: its function {definition.cpu} raised"):
            function(*arguments)
        for view, packed in copies:
            np.copyto(view, packed)
    finally:
        for argument in arguments:
            # The function may have kept it, and its memory will be another array's.
            if isinstance(argument, np.ndarray):
                argument.flags.writeable = False


@contextmanager
def _as_library_errors(label: str) -> Generator[None]:
    """Raise errors of the user's code as errors of its kernel, because others would be the engine's."""
    try:
        yield
    except MemoryError:
        # The backend reports memory errors, with the available memory.
        raise
    # Errors that end a task or an interpreter must get no further, either.
    except BaseException as error:  # noqa: ASYNC103
        code = type(error).__name__
        raise LibraryError(f"{label} {describe(error)}", library="jit", code=code) from error  # noqa: ASYNC104


def _find(name: str, path: str) -> _Function:
    """Import a function, which may take any time, because this is the stream's thread.

    It is not cached, because a cache would keep the function and its module alive.

    Raises:
        LibraryError: The function does not exist.
    """
    module, _, attribute = path.partition(":")
    with _as_library_errors(f"kernel {name!r}: its function {path} for the CPU cannot be imported:"):
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    if not callable(value):
        raise LibraryError(
            f"kernel {name!r}: {path} for the CPU is not a function, but {type(value).__name__}",
            library="jit",
            code="TypeError",
        )
    function: _Function = value
    return function
